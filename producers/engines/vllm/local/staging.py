"""Passes a weight update to vLLM's workers in other processes of this machine: tensors in a file in
shared memory, their positions in a message.
"""

import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypedDict

import torch

from rollstream.storage.weights.mapped import MappedTensors
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.streamed import open_nameless, path_of_open_file
from rollstream.storage.weights.tensors import DTYPE_NAMES, DTYPES, tensor_bytes, tensor_of

ALIGNMENT = 64  # bytes, of each tensor's begin in a staged file
# Without MAP_NORESERVE (0x4000 in mman.h) the kernel could refuse a file larger than the memory.
PRIVATE = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
STAGED_MAX = 2  # chunks: one is loaded while the next one is written


class StagedTensor(TypedDict):
    """`bytes` bytes from byte `begin` on."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    bytes: int


class StagedFile:
    """Named tensors in a file at `path`: a copy in shared memory, until `close`, or the file of
    `mapped`.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], mapped: MappedTensors | None = None
    ) -> None:
        self._held = mapped
        self._file = (
            None if mapped is not None else open_nameless("rollstream-weights", in_memory=True)
        )
        self.entries: list[StagedTensor] = []
        for name, tensor in tensors:
            begin = self._write(tensor) if mapped is None else mapped.begin(tensor)
            shape, kind, size = list(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.nbytes
            entry = StagedTensor(name=name, dtype=kind, shape=shape, begin=begin, bytes=size)
            self.entries.append(entry)
        if self._file is not None:
            self._file.flush()

    @property
    def path(self) -> str:
        if self._held is not None:
            return self._held.file.path
        assert self._file is not None, "opened above"
        return path_of_open_file(self._file)

    def close(self) -> None:
        """Give up the copy; its memory is freed once no worker has the file mapped."""
        if self._file is not None:
            self._file.close()

    def _write(self, tensor: torch.Tensor) -> int:
        assert self._file is not None, "opened above"
        begin = self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT)
        self._file.write(tensor_bytes(tensor))
        return begin


def staged_tensors(path: str, entries: Sequence[StagedTensor]) -> list[tuple[str, torch.Tensor]]:
    """Returns tensors that share the file's memory and must not be written."""
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


NamedTensors = Sequence[tuple[str, torch.Tensor]]
ChunkMessage = Mapping[str, Any]
"""Arguments of vLLM's `update_weights`: some fields of `transfer.WeightChunk`."""


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """A message to the workers, and the file of its tensors, which is closed after they have loaded
    them.
    """

    file: StagedFile
    patched: tuple[tuple[list[int], str], ...] | None = None
    """Shapes and types of the tensors that the patches in the file change; None for whole tensors.
    """

    @property
    def message(self) -> ChunkMessage:
        described = {"path": self.file.path, "entries": self.file.entries}
        return described if self.patched is None else described | {"patched": self.patched}


class StagedChunks:
    """At most `STAGED_MAX` chunks are in shared memory: chunk n + 2 is staged once chunk n is
    loaded, in a thread beside the loading of chunk n + 1.
    """

    def __init__(self, staged: Iterator[StagedMessage]) -> None:
        self._staged = staged
        self.first = list(islice(staged, STAGED_MAX))
        self.is_used = False
        """Whether `messages` was called: a staged chunk is loaded once."""

    def messages(self) -> Iterator[ChunkMessage]:
        """Yields each message once. The caller must have loaded a chunk when it requests the next:
        its memory is then released. Raises an error of staging.
        """
        self.is_used = True
        # Each item, when called, waits until its chunk is staged and returns it; None is the end.
        pending = deque[Callable[[], StagedMessage | None]](
            lambda chunk=chunk: chunk for chunk in self.first
        )
        self.first = []
        with ThreadPoolExecutor(1) as thread:
            while pending and (chunk := pending.popleft()()) is not None:
                with closing(chunk.file):
                    yield chunk.message
                pending.append(thread.submit(next, self._staged, None).result)


def stage_tensors(tensors: NamedTensors, mapped: MappedTensors | None = None) -> StagedMessage:
    return StagedMessage(StagedFile(tensors, mapped))


def stage_patches(patches: Sequence[TensorPatch]) -> StagedMessage:
    return StagedMessage(StagedFile(patch_parts(patches)), describe_patches(patches))


def patch_parts(patches: Sequence[TensorPatch]) -> list[tuple[str, torch.Tensor]]:
    """Returns for each patch its positions, then its values, both under the tensor's name."""
    return [(p.name, part) for p in patches for part in (p.indices, p.values)]


def describe_patches(patches: Sequence[TensorPatch]) -> tuple[tuple[list[int], str], ...]:
    return tuple((list(p.shape), DTYPE_NAMES[p.dtype]) for p in patches)


def read_staged_patches(
    path: str, entries: Sequence[StagedTensor], patched: Sequence[tuple[list[int], str]]
) -> list[TensorPatch]:
    return patches_from_parts(staged_tensors(path, entries), patched)


def patches_from_parts(
    parts: NamedTensors, patched: Sequence[tuple[list[int], str]]
) -> list[TensorPatch]:
    """Returns the patches of which `patch_parts` made these parts and `describe_patches` made
    `patched`.
    """
    return [
        TensorPatch(name, tuple(shape), DTYPES[kind], indices, values)
        for (shape, kind), (name, indices), (_, values) in zip(
            patched, parts[::2], parts[1::2], strict=True
        )
    ]
