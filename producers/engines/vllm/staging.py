"""Makes messages to vLLM's workers from chunks of an update: tensors within a process, and for
another process of this machine a staged file in shared memory.

At most two chunks of an update are staged at any time. Tensors that are in a file already
(`MappedTensors`) are not copied: the messages describe that file, and each worker reads its own
part of it.
"""

import mmap
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, TypedDict, cast

import torch

from rollstream.storage.weights.mapped import MappedTensors
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.streamed import path_of_open_file
from rollstream.storage.weights.tensors import DTYPE_NAMES, DTYPES, tensor_bytes, tensor_of

ALIGNMENT = 64
# A file may be larger than the memory (mman.h: MAP_NORESERVE).
PRIVATE = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
STAGED_MAX = 2  # chunks: one is loaded while the next one is written


class StagedTensor(TypedDict):
    """Describes where one tensor is in a staged file; `begin` and `bytes` count bytes."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    bytes: int


class StagedFile:
    """Holds named tensors in a file that other processes open by `path`. It is a copy in shared
    memory, which is written once and exists until `close`, or the file `held` that has the tensors
    already. `entries` describe the tensors by plain values: a message between the processes
    contains names, types, shapes and offsets only.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], held: MappedTensors | None = None
    ) -> None:
        self._held = held
        self._file = None if held is not None else open_shared("rollstream-weights")
        self.entries: list[StagedTensor] = []
        for name, tensor in tensors:
            begin = self._write(tensor) if held is None else held.begin(tensor)
            shape, kind, size = list(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.nbytes
            entry = StagedTensor(name=name, dtype=kind, shape=shape, begin=begin, bytes=size)
            self.entries.append(entry)
        if self._file is not None:
            self._file.flush()

    @property
    def path(self) -> str:
        """The path at which other processes open the file while this process has it open."""
        if self._held is not None:
            return self._held.file.path
        assert self._file is not None, "opened above"
        return path_of_open_file(self._file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, tensor: torch.Tensor) -> int:
        assert self._file is not None, "opened above"
        begin = self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT)
        self._file.write(tensor_bytes(tensor))
        return begin


def staged_tensors(path: str, entries: Sequence[StagedTensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that `entries` describe. They share the file's memory and must not be
    written.
    """
    if not entries:
        return []
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(mapped)
    return [
        (
            e["name"],
            tensor_of(view[e["begin"] : e["begin"] + e["bytes"]], e["dtype"], tuple(e["shape"])),
        )
        for e in entries
    ]


def open_shared(name: str) -> IO[bytes]:
    """Open an empty file in memory; the kernel frees it when its last user ends. Outside Linux it
    is a temporary file.
    """
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create(name), "w+b")
    return cast(IO[bytes], tempfile.NamedTemporaryFile("w+b", prefix=f"{name}-"))


NamedTensors = Sequence[tuple[str, torch.Tensor]]
ChunkMessage = Mapping[str, Any]
"""Arguments of vLLM's `update_weights`: the fields of `transfer.Chunk`."""


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """A message to the workers, with the file of its tensors; the receiver of this object closes
    the file after the workers loaded the message.
    """

    file: StagedFile
    patched: tuple[tuple[list[int], str], ...] | None = None
    """Shapes and types of the tensors that patches change; None: whole tensors."""

    @property
    def message(self) -> ChunkMessage:
        described = {"path": self.file.path, "entries": self.file.entries}
        return described if self.patched is None else described | {"patched": self.patched}


class StagedChunks:
    """Holds the chunks of one update, at most `STAGED_MAX` of them in shared memory. The
    constructor stages the first `STAGED_MAX` chunks. Chunk n + 2 is staged once chunk n is loaded,
    in a thread beside the loading of chunk n + 1.
    """

    def __init__(self, staged: Iterator[StagedMessage]) -> None:
        self._staged = staged
        self.first = list(islice(staged, STAGED_MAX))
        self.is_used = False
        """Whether `messages` was called: a staged chunk is loaded once."""

    def messages(self) -> Iterator[ChunkMessage]:
        """Yield the message of each chunk; a chunk's memory is released when the next message is
        requested. Raises an error that occurs while a chunk is staged.
        """
        self.is_used = True
        # Each call returns a staged chunk, waiting for the thread, or None after the last chunk.
        pending = deque[Callable[[], StagedMessage | None]](
            lambda chunk=chunk: chunk for chunk in self.first
        )
        self.first = []
        with ThreadPoolExecutor(1) as thread:
            while pending and (chunk := pending.popleft()()) is not None:
                with closing(chunk.file):
                    yield chunk.message
                pending.append(thread.submit(next, self._staged, None).result)


def stage_tensors(tensors: NamedTensors, held: MappedTensors | None = None) -> StagedMessage:
    return StagedMessage(StagedFile(tensors, held))


def stage_patches(patches: Sequence[TensorPatch]) -> StagedMessage:
    return StagedMessage(StagedFile(patch_parts(patches)), describe_patches(patches))


def patch_parts(patches: Sequence[TensorPatch]) -> list[tuple[str, torch.Tensor]]:
    """Return the positions and the values of each patch, one after the other."""
    return [(p.name, part) for p in patches for part in (p.indices, p.values)]


def describe_patches(patches: Sequence[TensorPatch]) -> tuple[tuple[list[int], str], ...]:
    """Return shapes and types of the tensors that the patches change."""
    return tuple((list(p.shape), DTYPE_NAMES[p.dtype]) for p in patches)


def read_staged_patches(
    path: str, entries: Sequence[StagedTensor], patched: Sequence[tuple[list[int], str]]
) -> list[TensorPatch]:
    """Return the patches in a staged file."""
    return patches_from_parts(staged_tensors(path, entries), patched)


def patches_from_parts(
    parts: NamedTensors, patched: Sequence[tuple[list[int], str]]
) -> list[TensorPatch]:
    """Return patches from their positions and values, which come one after the other."""
    return [
        TensorPatch(name, tuple(shape), DTYPES[kind], indices, values)
        for (shape, kind), (name, indices), (_, values) in zip(
            patched, parts[::2], parts[1::2], strict=True
        )
    ]
