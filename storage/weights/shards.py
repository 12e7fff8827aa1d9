"""Shards: safetensors files of bounded size, written here, because equal tensors must give equal
bytes (the library's metadata has a random order) and the manifest needs ranges.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import Data, ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent
from rollstream.storage.weights.manifest import FileEntry, TensorEntry, TensorFiles
from rollstream.storage.weights.tensors import (
    DTYPE_NAMES,
    DTYPES,
    DistributedTensors,
    Tensors,
    tensor_bytes,
    tensor_hash,
    tensor_of,
    untie,
)

METADATA = {"format": "pt"}
"""transformers refuses files without this key."""
NO_HASHES: Mapping[str, str] = {}
GAP_BYTES_MAX = 64 << 10  # reading this many unused bytes costs less than one more request
RANGE_BYTES_MAX = 64 << 20
"""Most bytes of one request for several tensors: one is processed while the next arrives."""


class FileRange(Protocol):
    """Covers the bytes `[start, end)` of a file."""

    @property
    def file(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ShardPart:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Data


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Returns the names by shard, in their order, each of at most `shard_bytes` or one larger
    tensor.
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def join_shard(parts: Sequence[ShardPart]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Returns one safetensors file, and each part's byte range `[start, end)`."""
    header: dict[str, object] = {"__metadata__": METADATA}
    at = 0
    for part in parts:
        end = at + len(part.data)
        header[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places: dict[str, tuple[int, int]] = {}
    start = 8 + len(text)
    for part in parts:
        places[part.name] = (start, start + len(part.data))
        start += len(part.data)
    data = b"".join([len(text).to_bytes(8, "little"), text, *(part.data for part in parts)])
    return data, places


def pack_tensors(
    tensors: Mapping[str, torch.Tensor], file: str, hashes: Mapping[str, str] = NO_HASHES
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Returns one safetensors file and its tensors' entries. Equal tensors give equal bytes; those
    in `hashes` are not hashed again.
    """
    # Wide types come first, which keeps every tensor aligned to its item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    parts = [
        ShardPart(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor))
        for name, tensor in ordered
    ]
    data, places = join_shard(parts)
    entries = {
        part.name: TensorEntry(
            file,
            *places[part.name],
            part.dtype,
            part.shape,
            hashes.get(part.name) or tensor_hash(part.dtype, part.shape, part.data),
        )
        for part in parts
    }
    return data, entries


def shard_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def write_shards(
    store: ObjectStore,
    folder: str,
    stem: str,
    tensors: Tensors,
    shard_bytes: int,
    hashes: Mapping[str, str] = NO_HASHES,
) -> TensorFiles:
    """Create `folder/stem-0000i-of-0000n.safetensors`; equal existing files stay. Of distributed
    tensors each process writes its own.
    """
    if isinstance(tensors, DistributedTensors):
        return tensors.write_shards(store, folder, stem, shard_bytes)
    untied, tied = untie(tensors)
    files: list[FileEntry] = []
    entries: dict[str, TensorEntry] = {}
    for file, data, placed in packed_shards(untied, stem, shard_bytes, hashes):
        files.append(FileEntry(file, len(data), create_idempotent(store, f"{folder}/{file}", data)))
        entries.update(placed)
    return TensorFiles(tuple(files), entries, tied)


def packed_shards(
    tensors: Mapping[str, torch.Tensor],
    stem: str,
    shard_bytes: int,
    hashes: Mapping[str, str] = NO_HASHES,
) -> Iterator[tuple[str, bytes, dict[str, TensorEntry]]]:
    shards = plan_shards({name: tensor.nbytes for name, tensor in tensors.items()}, shard_bytes)
    for number, names in enumerate(shards, start=1):
        file = shard_name(stem, number, len(shards))
        yield file, *pack_tensors({name: tensors[name] for name in names}, file, hashes)


@dataclass(frozen=True, slots=True)
class FetchRange:
    file: str
    start: int
    end: int
    names: tuple[str, ...]


def plan_ranges(entries: Mapping[str, FileRange]) -> list[FetchRange]:
    """Ranges of one file share a request if at most `GAP_BYTES_MAX` lie between them, up to
    `RANGE_BYTES_MAX`.
    """
    ranges: list[FetchRange] = []
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].start)):
        last = ranges[-1] if ranges else None
        near = last and last.file == entry.file and entry.start - last.end <= GAP_BYTES_MAX
        if last and near and entry.end - last.start <= RANGE_BYTES_MAX:
            ranges[-1] = FetchRange(last.file, last.start, entry.end, (*last.names, name))
        else:
            ranges.append(FetchRange(entry.file, entry.start, entry.end, (name,)))
    return ranges


_PART = re.compile(r"(.+)\[(\d+):(\d+)\]")


def part_name(name: str, start: int, stop: int) -> str:
    """Returns the stored name of rows `[start, stop)` of a tensor."""
    return f"{name}[{start}:{stop}]"


def has_parts(source: TensorFiles) -> bool:
    """Returns whether any of the tensors is stored in parts."""
    return any(_PART.fullmatch(name) for name in source.tensors)


class StoredTensors(Mapping[str, torch.Tensor]):
    """Each tensor is read and verified when requested; parts of consecutive rows, as in checkpoints
    of several ranks, are joined. The tensors must not be written to. Raises `CorruptObject`, which
    names tensor and file.
    """

    def __init__(self, store: ObjectStore, folder: str, files: TensorFiles) -> None:
        self._store, self.folder, self.files = store, folder, files
        self._requests = {
            name: request for request in plan_ranges(files.tensors) for name in request.names
        }
        self._last: tuple[FetchRange, dict[str, torch.Tensor]] | None = None
        parts: dict[str, list[tuple[int, int, str]]] = {}
        for name in files.names:
            match, shape = _PART.fullmatch(name), files.entry(name).shape
            tensor_name = match[1] if match else name
            start, stop = (int(match[2]), int(match[3])) if match else (0, shape[0] if shape else 1)
            parts.setdefault(tensor_name, []).append((start, stop, name))
        self._parts = {name: sorted(row_ranges) for name, row_ranges in parts.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = self._parts[name]
        if len(parts) == 1 and parts[0][2] == name:
            return self._read(name)
        return torch.cat([self._read(part) for _, _, part in parts])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a whole tensor's shape; None if it or a part of it is missing."""
        parts = self._parts.get(name)
        if parts is None:
            return None
        shape = self.files.entry(parts[0][2]).shape
        if parts[0][2] == name:
            return shape
        ends = [0, *(stop for _, stop, _ in parts)]
        gapless = all(start == end for (start, _, _), end in zip(parts, ends, strict=False))
        return (ends[-1], *shape[1:]) if gapless else None

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns rows `[start, stop)` of a tensor; reads only the parts with some of them."""
        slices: list[torch.Tensor] = []
        for first, last, part in self._parts[name]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                slices.append(self._read(part)[low - first : high - first])
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _read(self, name: str) -> torch.Tensor:
        owner = self.files.owner(name)
        request = self._requests[owner]
        if self._last is None or self._last[0] is not request:
            self._last = None
            # All are kept until the next request: callers ask for neighbours one after the other.
            tensors = dict(_read_range(self._store, self.folder, self.files, request))
            self._last = request, tensors
        return self._last[1][owner]


def _read_range(
    store: ObjectStore, folder: str, source: TensorFiles, request: FetchRange
) -> Iterator[tuple[str, torch.Tensor]]:
    key = f"{folder}/{request.file}"
    # Copied once: the store may keep the bytes that it returns, and tensors are changed in place.
    stored = np.frombuffer(store.get(key, request.start, request.end), np.uint8)
    data = np.array(stored).data
    for name in request.names:
        entry = source.tensors[name]
        part = data[entry.start - request.start : entry.end - request.start]
        is_complete = entry.dtype in DTYPES and len(part) == entry.end - entry.start
        if not is_complete or tensor_hash(entry.dtype, entry.shape, part) != entry.hash:
            raise wrong_tensor(name, key)
        yield name, tensor_of(part, entry.dtype, entry.shape)


def wrong_tensor(name: str, key: str) -> CorruptObject:
    return CorruptObject(
        f"tensor {name} in object {key} differs from its hash; fetch the version again, and if it "
        "stays so, remove it"
    )
