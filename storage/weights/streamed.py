"""Fetches a version without a second copy of the weights in memory: the reader's own weights are
the base of its deltas and do not change (docs/explanation/weights.md, Streamed into the engine).
Memory is two pieces of `PIECE_BYTES` for the fetch, and a few segments of a tensor for `parts`.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import IO, cast

import numpy as np
import torch

from rollstream.errors import CorruptObject, StoreError
from rollstream.os_failures import explain_os_error
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
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.resident import ROUNDS_MAX
from rollstream.storage.weights.shards import FetchRange
from rollstream.storage.weights.tensors import tensor_hasher, tensor_of
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
    """Raised if the tensors `names` differ from their hashes after verified deltas: the reader's
    were not the deltas' base, as an engine does not give every tensor back bit for bit. The caller
    fetches them without a base.
    """

    def __init__(self, names: Collection[str], version: Version) -> None:
        self.names = frozenset(names)
        super().__init__(
            f"{len(self.names)} tensors that the engine gives back are not those that the deltas "
            f"to version {version} were made from, {min(self.names)} among them"
        )


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Holds a tensor's elements from position `begin` on, as bits. Only those at the positions
    `changed` in the part (ascending) may differ from the base; None: all may. If `is_mapped`, the
    values are a view of the fetched file and take no memory.
    """

    begin: int
    values: Bits
    changed: Indices | None
    is_mapped: bool = False


@dataclass(frozen=True, eq=False)
class StreamedTensors(Mapping[str, torch.Tensor]):
    """Maps all names of one version to its tensors, each decoded when requested; deltas need the
    reader's tensors (`uses_base`), which are of version `base`, None if unknown or not needed.
    """

    manifest: Manifest
    base: Version | None
    fetched_bytes: int
    _paths: Mapping[str, FetchPath]
    """By stored name; a path has no steps if the reader's tensor is the wanted one."""
    _data: Mapping[StepKey, memoryview]
    """The fetched bytes of each step."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.weights.names)

    def __len__(self) -> int:
        return len(self.manifest.weights.names)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.weights.tensors or name in self.manifest.weights.tied

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensor(name)

    @property
    def uses_base(self) -> bool:
        """Returns whether any tensor is made from the reader's or equal to it."""
        return any(not (path.steps and path.steps[0].is_whole) for path in self._paths.values())

    @property
    def sizes(self) -> dict[str, int]:
        weights = self.manifest.weights
        return {name: weights.entry(name).bytes for name in weights.names}

    def differs(self, name: str) -> bool:
        """Returns whether the tensor differs from the reader's."""
        return bool(self._path(name).steps)

    def changes_max(self, name: str) -> int:
        """Returns an upper bound of the elements that differ from the reader's; 0 also if more than
        half may.
        """
        path = self._path(name)
        if any(step.is_whole for step in path.steps):
            return 0
        changed = sum(step.delta.changed for step in path.steps if step.delta)
        return changed if 2 * changed <= prod(path.entry.shape) else 0

    def tensor(self, name: str, base: ReadElements | None = None) -> torch.Tensor:
        """Returns the complete tensor in memory of its own; raises as `parts`."""
        entry = self.manifest.weights.entry(name)
        bits = np.empty(prod(entry.shape), element_of(entry.dtype).bits)
        for part in self.parts(name, base):
            bits[part.begin : part.begin + len(part.values)] = part.values
        return tensor_of(bits.view(np.uint8).data, entry.dtype, entry.shape)

    def parts(self, name: str, base: ReadElements | None = None) -> Iterator[TensorPart]:
        """Yield all elements of a tensor in order, one segment (4 Mi elements) at a time; `base`
        reads the reader's tensor, if it is stored as a delta. Its hash is compared after the last
        part: rely on no part before.

        Raises `WrongBase` if a tensor made from `base` differs or a delta does not fit it,
        `CorruptObject` if any other differs.
        """
        path = self._path(name)
        first, element = path.steps[0] if path.steps else None, element_of(path.entry.dtype)
        is_copied = first is not None and first.delta is None
        stored = bits_of(self._payload(first), element) if first and is_copied else None
        # A complete first step is copied, and only deltas follow it.
        decoders = [self._decoder(step, element) for step in path.steps[is_copied:]]
        is_whole = first is not None and first.is_whole
        assert is_whole or base is not None, f"{name} is stored as a delta and has no base here"
        hasher = tensor_hasher(path.entry.dtype, path.entry.shape)
        try:
            for at in segments(prod(path.entry.shape)):
                if stored is not None:
                    values = stored[at].copy() if decoders else stored[at]
                elif is_whole or base is None:
                    values = np.empty(at.stop - at.start, element.bits)
                else:
                    values = base(at.start, at.stop)
                changed = None if stored is not None else np.zeros(0, np.int64)
                for decoder in decoders:
                    changed = _joined(changed, decoder.apply(values))
                hasher.update(values.view(np.uint8).data)
                is_mapped = stored is not None and not decoders
                yield TensorPart(at.start, values, changed, is_mapped)
            for decoder in decoders:
                decoder.finish()
        except CorruptObject as error:
            if is_whole:
                raise
            raise WrongBase((name,), self.manifest.version) from error
        if hasher.hexdigest() == path.entry.hash:
            return
        if not is_whole:
            raise WrongBase((name,), self.manifest.version)
        raise CorruptObject(
            f"tensor {name} of version {self.manifest.version} differs from its hash although all "
            "that it is made of was intact; fetch another version"
        )

    def _path(self, name: str) -> FetchPath:
        return self._paths[self.manifest.weights.owner(name)]

    def _payload(self, step: FetchStep) -> memoryview:
        return self._data[step.key] if step.bytes else memoryview(b"")

    def _decoder(self, step: FetchStep, element: Element) -> SegmentDecoder:
        assert step.delta is not None, "only the first step can be a complete tensor"
        return SegmentDecoder(step.delta.coding, step.delta.values, self._payload(step), element)


def _joined(earlier: Indices | None, later: Indices | None) -> Indices | None:
    if earlier is None or later is None:
        return None
    return np.union1d(earlier, later) if len(earlier) else later


def stream_version(
    store: ObjectStore,
    target: Version,
    manifest_hash: str | None = None,
    held: Manifest | None = None,
    without: Collection[str] = (),
) -> StreamedTensors:
    """Fetch the verified bytes that turn the tensors of the version `held` (None: none) into those
    of `target`; a tensor with a damaged part is fetched by another path. The tensors `without`, by
    any of their names, are no base. Raises as `ResidentWeights.update`; nothing has changed then.
    """
    manifest = read_manifest(store, target, manifest_hash)
    base_entries = (
        {} if held is None else {name: held.weights.entry(name) for name in held.weights.names}
    )
    excluded = {manifest.weights.owner(name) for name in without}
    hashes = {name: entry.hash for name, entry in base_entries.items() if name not in excluded}
    tensors = stream_tensors(
        store, manifest, HeldTensors(hashes, held.version.number if held else 0)
    )
    return replace(tensors, base=held.version) if held and tensors.uses_base else tensors


def stream_tensors(store: ObjectStore, manifest: Manifest, base: HeldTensors) -> StreamedTensors:
    """Fetch as `stream_version` for a manifest that was read already; the reader's tensors `base`
    need not be of one version.
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
    return StreamedTensors(manifest, None, spooled.bytes, paths, spooled.data)


class ScratchFile:
    """Provides zeroed bytes in a mapped file of the folder for temporary files (`TMPDIR`). Its
    pages belong to the kernel's cache, so processes that map it share them. On Linux the file has
    no name, and its space is freed with the last process that maps it, also after `kill -9`.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes, or raise `StoreError` if the disk has no room."""
        self._file = _open_nameless()
        try:
            # Reserved at once, so no later write fails because the disk is full.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
            else:
                self._file.truncate(max(size, 1))
        except OSError as error:
            self._file.close()
            raise StoreError(
                f"{size / 1e9:.2f} GB of weights do not fit into {tempfile.gettempdir()} "
                f"({explain_os_error(error)}); TMPDIR names a larger disk"
            ) from error
        self.data = memoryview(mmap.mmap(self._file.fileno(), max(size, 1)))[:size]
        """A write is visible to every process that maps the file."""

    @property
    def path(self) -> str:
        """Returns a path for other processes of this machine, valid while this object exists."""
        return path_of_open_file(self._file)


def path_of_open_file(file: IO[bytes]) -> str:
    """Returns a path for other processes of this machine while this one has the file open."""
    if isinstance(file.name, str):
        return file.name
    # A file without a name.
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _open_nameless() -> IO[bytes]:
    if sys.platform == "linux":
        return tempfile.TemporaryFile(prefix="rollstream-version-")
    return cast(IO[bytes], tempfile.NamedTemporaryFile(prefix="rollstream-version-"))


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
