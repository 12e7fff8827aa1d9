"""Tensors for another process of this machine, in shared memory that the kernel frees when its last
user ends.

A staged file is written once, named by a path that the other process opens, and described by plain
values: a message between the processes contains names, types, shapes and offsets only.
"""

# pyright: reportUnknownMemberType=false

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, TypedDict, cast

import torch

from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes, tensor_of

ALIGNMENT = 64


class StagedTensor(TypedDict):
    """One tensor of a staged file."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    bytes: int


class StagedFile:
    """Named tensors in shared memory, until `close`."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._file = open_shared("rollstream-weights")
        self.entries: list[StagedTensor] = []
        for name, tensor in tensors:
            begin = self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT)
            size = self._file.write(tensor_bytes(tensor))
            shape, kind = list(tensor.shape), DTYPE_NAMES[tensor.dtype]
            entry = StagedTensor(name=name, dtype=kind, shape=shape, begin=begin, bytes=size)
            self.entries.append(entry)
        self._file.flush()

    @property
    def path(self) -> str:
        """The path at which other processes open the file while this one has it open."""
        return shared_path(self._file)

    def close(self) -> None:
        self._file.close()


def staged_tensors(path: str, entries: Sequence[StagedTensor]) -> list[tuple[str, torch.Tensor]]:
    """These tensors of a staged file. They share its memory and must not be written."""
    if not entries:
        return []
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(mapped)
    return [
        (
            e["name"],
            tensor_of(view[e["begin"] : e["begin"] + e["bytes"]], e["dtype"], tuple(e["shape"])),
        )
        for e in entries
    ]


def open_shared(name: str) -> IO[bytes]:
    """An empty file in memory, which is freed with its last user."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create(name), "w+b")
    return cast(IO[bytes], tempfile.NamedTemporaryFile("w+b", prefix=f"{name}-"))


def shared_path(file: IO[bytes]) -> str:
    """The path at which other processes open the file while this one has it open."""
    if isinstance(file.name, str):
        return file.name
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"
