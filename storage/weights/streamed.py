"""Fetches a version's verified bytes into a file, from which its tensors are decoded a segment at a
time over those of the reader (`stream_tensors`). Nothing of the reader's changes before all is
fetched. Memory is two pieces of `PIECE_BYTES` for the fetch, and a few segments of a tensor.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import IO, cast

import numpy as np

from rollstream.errors import CorruptObject, StoreError
from rollstream.os_failures import explain_os_error
from rollstream.storage.settings import MEMORY_FILE_BYTES
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.anchors import find_fetch_paths, find_other_paths
from rollstream.storage.weights.delta.codec import SegmentDecoder, bits_of
from rollstream.storage.weights.delta.coding import Bits, Element, Indices, element_of
from rollstream.storage.weights.delta.sparse import segments
from rollstream.storage.weights.fetch_execution import (
    FetchRequest,
    check_stored,
    fetch_requests,
    fetched,
)
from rollstream.storage.weights.fetch_plan import FetchPath, FetchStep, HeldTensors
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.resident import ROUNDS_MAX
from rollstream.storage.weights.shards import FetchRange
from rollstream.storage.weights.tensors import tensor_hasher
from rollstream.streams.values import Version

PIECE_BYTES = 8 << 20  # of one request; at most two pieces are in memory, the others in the file

ReadElements = Callable[[int, int], Bits]
"""Returns the reader's elements `[begin, end)` in row-major order, as bits that the caller may
change.
"""
StepKey = tuple[Version, str, bool]
"""`FetchStep.key`: version, tensor, and whether it is a delta's payload (else the complete tensor).
"""


class WrongBase(CorruptObject):
    """Raised if the tensor `name` differs from its hash after verified deltas: the reader's was not
    the deltas' base. The caller fetches it without a base.
    """

    def __init__(self, name: str, version: Version) -> None:
        self.name = name
        super().__init__(
            f"tensor {name} here is not the one that the deltas to version {version} were made from"
        )


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Holds a tensor's elements from position `begin` on, as bits. Only those at the positions
    `changed` in the part (ascending) may differ from the base; None: all may.
    """

    begin: int
    values: Bits
    changed: Indices | None


@dataclass(frozen=True)
class StreamedTensors:
    """Decodes the tensors of one version, by their stored names; deltas need the reader's."""

    manifest: Manifest
    fetched_bytes: int
    _paths: Mapping[str, FetchPath]
    """By stored name; a path has no steps if the reader's tensor is the wanted one."""
    _data: Mapping[StepKey, memoryview]
    """The fetched bytes of each step."""

    def differs(self, name: str) -> bool:
        """Returns whether the tensor differs from the reader's."""
        return bool(self._paths[name].steps)

    def changes_max(self, name: str) -> int:
        """Returns an upper bound of the elements that differ from the reader's; 0 also if more than
        half may.
        """
        path = self._paths[name]
        if any(step.is_whole for step in path.steps):
            return 0
        changed = sum(step.delta.changed for step in path.steps if step.delta)
        return changed if 2 * changed <= prod(path.entry.shape) else 0

    def parts(self, name: str, base: ReadElements) -> Iterator[TensorPart]:
        """Yield all elements of a tensor in order, one segment (4 Mi elements) at a time; `base`
        reads the reader's tensor, if it is stored as a delta. Its hash is compared after the last
        part: rely on no part before.

        Raises `WrongBase` if a tensor made from `base` differs or a delta does not fit it,
        `CorruptObject` if any other differs.
        """
        path = self._paths[name]
        first, element = path.steps[0] if path.steps else None, element_of(path.entry.dtype)
        is_copied = first is not None and first.delta is None
        stored = bits_of(self._payload(first), element) if first and is_copied else None
        # A complete first step is copied, and only deltas follow it.
        decoders = [self._decoder(step, element) for step in path.steps[is_copied:]]
        is_whole = first is not None and first.is_whole
        hasher = tensor_hasher(path.entry.dtype, path.entry.shape)
        try:
            for at in segments(prod(path.entry.shape)):
                if stored is not None:
                    values = stored[at].copy() if decoders else stored[at]
                elif is_whole:
                    values = np.empty(at.stop - at.start, element.bits)
                else:
                    values = base(at.start, at.stop)
                changed = None if stored is not None else np.zeros(0, np.int64)
                for decoder in decoders:
                    changed = _joined(changed, decoder.apply(values))
                hasher.update(values.view(np.uint8).data)
                yield TensorPart(at.start, values, changed)
            for decoder in decoders:
                decoder.finish()
        except CorruptObject as error:
            if is_whole:
                raise
            raise WrongBase(name, self.manifest.version) from error
        if hasher.hexdigest() == path.entry.hash:
            return
        if not is_whole:
            raise WrongBase(name, self.manifest.version)
        raise CorruptObject(
            f"tensor {name} of version {self.manifest.version} differs from its hash although all "
            "that it is made of was intact; fetch another version"
        )

    def _payload(self, step: FetchStep) -> memoryview:
        return self._data[step.key] if step.bytes else memoryview(b"")

    def _decoder(self, step: FetchStep, element: Element) -> SegmentDecoder:
        assert step.delta is not None, "only the first step can be a complete tensor"
        return SegmentDecoder(step.delta.coding, step.delta.values, self._payload(step), element)


def _joined(earlier: Indices | None, later: Indices | None) -> Indices | None:
    if earlier is None or later is None:
        return None
    return np.union1d(earlier, later) if len(earlier) else later


def stream_tensors(store: ObjectStore, manifest: Manifest, base: HeldTensors) -> StreamedTensors:
    """Fetch the verified bytes that turn the reader's tensors `base`, which need not be of one
    version, into those of the manifest; a tensor with a damaged part is fetched by another path.
    Raises as `MappedWeights.update`; nothing has changed then.
    """
    paths = find_fetch_paths(store, manifest, tuple(manifest.weights.tensors), base)
    spooled = _Spooled()
    failed = spooled.fetch(store, paths)
    for _ in range(ROUNDS_MAX - 1):
        if not failed:
            break
        others = find_other_paths(store, manifest, failed, spooled.broken, base)
        paths |= others
        failed = spooled.fetch(store, others)
    for error in failed.values():
        raise error
    return StreamedTensors(manifest, spooled.bytes, paths, spooled.data)


class ScratchFile:
    """Provides zeroed bytes that other processes of this machine can map: up to
    `MEMORY_FILE_BYTES` in memory, more in the folder for temporary files (`TMPDIR`), where the
    pages belong to the kernel's cache. On Linux the file has no name, and its space is freed with
    the last process that maps it, also after `kill -9`.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes, or raise `StoreError` if the disk has no room."""
        in_memory = size <= MEMORY_FILE_BYTES
        self._file = open_nameless("rollstream-version", in_memory)
        try:
            # Reserved at once, so no later write fails because the disk is full.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
            else:
                self._file.truncate(max(size, 1))
        except OSError as error:
            self._file.close()
            place = "memory" if in_memory else tempfile.gettempdir()
            raise StoreError(
                f"{size / 1e9:.2f} GB of weights do not fit into {place} "
                f"({explain_os_error(error)})"
                + ("" if in_memory else "; TMPDIR names a larger disk")
            ) from error
        self.data = memoryview(mmap.mmap(self._file.fileno(), max(size, 1)))[:size]
        """A write is visible to every process that maps the file."""

    @property
    def path(self) -> str:
        """Returns a path for other processes of this machine, valid while this object exists."""
        return path_of_open_file(self._file)


def path_of_open_file(file: IO[bytes]) -> str:
    """Returns a path for other processes of this machine while this one has the file open."""
    if sys.platform != "linux":
        return str(file.name)
    # A file without a name.
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def open_nameless(label: str, in_memory: bool) -> IO[bytes]:
    """Open an empty file, in memory or in `TMPDIR`, which the kernel frees when no process has it
    open or mapped. Outside Linux it has a name and is in `TMPDIR`.
    """
    if sys.platform != "linux":
        return cast(IO[bytes], tempfile.NamedTemporaryFile("w+b", prefix=f"{label}-"))
    if in_memory:
        return os.fdopen(os.memfd_create(label), "w+b")
    return tempfile.TemporaryFile(prefix=f"{label}-")


@dataclass(slots=True)
class _Spooled:
    """Collects verified bytes of steps in a `ScratchFile` (`data`), the steps with wrong ones
    (`broken`), and the count of all fetched `bytes`.
    """

    data: dict[StepKey, memoryview] = field(default_factory=dict[StepKey, memoryview])
    broken: set[StepKey] = field(default_factory=set[StepKey])
    bytes: int = 0

    def fetch(self, store: ObjectStore, paths: Mapping[str, FetchPath]) -> dict[str, CorruptObject]:
        requests = list(fetch_requests(paths))
        size = sum(request.range.end - request.range.start for request in requests)
        if not size:
            return {}
        spool, at = ScratchFile(size).data, 0
        for piece, data in fetched(store, (p for r in requests for p in _pieces(r))):
            spool[at : at + len(data)] = data
            at += piece.range.end - piece.range.start
            self.bytes += len(data)
        # By the tensor's name: a step with wrong bytes.
        failed: dict[str, CorruptObject] = {}
        at = 0
        for request in requests:
            for name in request.range.names:
                step = request.steps[name]
                begin = at + step.start - request.range.start
                part = spool[begin : begin + step.bytes]
                try:
                    check_stored(paths[name], step, part)
                except CorruptObject as error:
                    self.broken.add(step.key)
                    failed[name] = error
                else:
                    self.data[step.key] = part
            at += request.range.end - request.range.start
        return failed


def _pieces(request: FetchRequest) -> Iterator[FetchRequest]:
    file_range = request.range
    for begin in range(file_range.start, file_range.end, PIECE_BYTES):
        part = FetchRange(file_range.file, begin, min(file_range.end, begin + PIECE_BYTES), ())
        yield FetchRequest(request.version, part, {})
