"""Reads the model that a run starts from on any host (`StoredModel`), without torch: files, or rows
of a tensor, all verified by hash (invariant 6).
"""

import logging
import math
import os
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from rollstream.errors import CorruptObject
from rollstream.storage.model_folder.hf_folder import GENERATION, TEMPLATES, small_files
from rollstream.storage.model_folder.hf_tokenizer import is_tokenizer_file
from rollstream.storage.model_folder.hf_weights import INDEX
from rollstream.storage.starting_model.manifest import (
    ADAPTER,
    MODEL_KEY,
    BlockedTensor,
    ModelManifest,
    is_same,
    is_weights,
    of_model,
)
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.manifest import FileEntry

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Most bytes that are read at a time, unless one block is larger."""


@dataclass(slots=True)
class StoredModel:
    """Reads a file or block from the first of `folders` on this host with the same bytes, else from
    the store. All is verified; a damaged object raises `CorruptObject`, which names it.
    """

    store: ObjectStore
    manifest: ModelManifest
    folders: tuple[Path, ...] = ()
    store_bytes: int = 0
    """Bytes read from the store."""
    _other: set[Path] = field(default_factory=set[Path])
    """Files on this host with other content."""

    def fetch(self, name: str) -> bytes:
        entry = self.manifest.entry(name)
        for folder in self.folders:
            if is_same(folder / name, entry):
                return (folder / name).read_bytes()
        data = self.store.get(self.manifest.key(name))
        self.store_bytes += len(data)
        if content_hash(data) != entry.hash:
            raise self._damaged(name)
        return data

    def row_pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield rows `[start, stop)` of a tensor in consecutive pieces: the number of the first
        row, and the bytes. Only the blocks with these rows are read.
        """
        tensor = self.manifest.tensors[name]
        assert 0 <= start <= stop <= tensor.rows, (name, tensor.shape, start, stop)
        if start == stop or not tensor.blocks:
            return
        height, row_bytes = tensor.block_rows, tensor.row_bytes
        first, last = start // height, math.ceil(stop / height)
        step = max(1, PIECE_BYTES // (height * row_bytes))
        for block in range(first, last, step):
            data = self._blocks(name, block, min(block + step, last))
            begin = block * height
            low, high = max(begin, start), min(begin + len(data) // row_bytes, stop)
            yield low, data[(low - begin) * row_bytes : (high - begin) * row_bytes]

    def _blocks(self, name: str, first: int, last: int) -> memoryview:
        tensor = self.manifest.tensors[name]
        begin, end = _range_of(tensor, first, last)
        for folder in self.folders:
            path = folder / tensor.file
            if path in self._other or (data := _read_range(path, begin, end)) is None:
                continue
            if _are_blocks(data, tensor, first, last):
                return data
            self._other.add(path)
            log.warning("%s is not the file of the run's model: the store's is read", path)
        data = memoryview(self.store.get(self.manifest.key(tensor.file), begin, end))
        self.store_bytes += len(data)
        if len(data) != end - begin or not _are_blocks(data, tensor, first, last):
            raise self._damaged(tensor.file, f"tensor {name} in ")
        return data

    def host_folder(self, prefix: str, source: Path | None, cache: Path) -> Path:
        """Returns a folder with the files of this prefix ("" for the model's own, without weights):
        `source` if its files are the same, else a folder in `cache`, which is repaired. Every file
        is compared with its hash at each call.
        """
        entries = [entry for entry in self.manifest.files if _is_below(entry.name, prefix)]
        names = {entry: entry.name.removeprefix(prefix) for entry in entries}
        if source is not None:
            is_whole = all(is_same(source / name, entry) for entry, name in names.items())
            # PEFT writes the tokenizer beside an adapter, which no role reads there.
            if is_whole and (prefix == ADAPTER or not _has_more(source, names.values())):
                return source
            if source.exists() and source != cache / prefix:
                log.warning("%s is not the run's model: files of the run's store are used", source)
        for entry in entries:
            self.write_file(entry, cache / entry.name)
        return cache / prefix

    @property
    def has_adapter(self) -> bool:
        """Whether the run starts from an adapter, which its store has."""
        return any(entry.name.startswith(ADAPTER) for entry in self.manifest.files)

    def host_file(self, name: str, source: Path, cache: Path) -> Path:
        """Returns a file of the task: `source` if it is the same, else the one in `cache`."""
        entry = self.manifest.entry(name)
        if is_same(source, entry):
            return source
        if source.exists():
            log.warning("%s is not the file of the run's task: the store's is used", source)
        self.write_file(entry, cache / name)
        return cache / name

    def whole_folder(self) -> Path | None:
        """Returns the first of `folders` with every file of the model, weights too."""
        entries = [entry for entry in self.manifest.files if of_model(entry.name)]
        for folder in self.folders:
            if all(is_same(folder / entry.name, entry) for entry in entries):
                return folder
        return None

    def write_folder(self, folder: Path) -> Path:
        """Write every file of the model, weights too; returns the folder."""
        for entry in self.manifest.files:
            if of_model(entry.name):
                self.write_file(entry, folder / entry.name)
        return folder

    def write_file(self, entry: FileEntry, path: Path) -> None:
        """Write a file unless it is there, under a temporary name until its hash is right."""
        if is_same(path, entry):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial, hasher = path.with_name(f".{path.name}.{secrets.token_hex(8)}"), xxhash.xxh3_128()
        try:
            with partial.open("xb") as file:
                for at in range(0, entry.bytes, PIECE_BYTES):
                    end = min(at + PIECE_BYTES, entry.bytes)
                    data = self.store.get(self.manifest.key(entry.name), at, end)
                    self.store_bytes += len(data)
                    hasher.update(data)
                    file.write(data)
            if hasher.hexdigest() != entry.hash:
                raise self._damaged(entry.name)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _damaged(self, name: str, what: str = "") -> CorruptObject:
        return CorruptObject(
            f"{what}object {self.manifest.key(name)} differs from its hash in {MODEL_KEY}; restore "
            "the object from a backup, or start a new run"
        )


def _is_below(name: str, prefix: str) -> bool:
    if prefix:
        return name.startswith(prefix)
    return of_model(name) and not is_weights(name) and name != INDEX


def _has_more(folder: Path, names: Collection[str]) -> bool:
    has_templates = any(name.startswith(TEMPLATES) for name in names)
    return any(
        (is_tokenizer_file(name) or name == GENERATION)
        and name not in names
        # An earlier release began runs without further chat templates.
        and (has_templates or not name.startswith(TEMPLATES))
        for name in small_files(folder)
    )


def _read_range(path: Path, start: int, end: int) -> memoryview | None:
    """None if the file does not exist or is shorter."""
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), end - start, start)
    except OSError:
        return None
    return memoryview(data) if len(data) == end - start else None


def _range_of(tensor: BlockedTensor, first: int, last: int) -> tuple[int, int]:
    size = tensor.block_rows * tensor.row_bytes
    return tensor.start + first * size, min(tensor.start + last * size, tensor.end)


def _are_blocks(data: memoryview, tensor: BlockedTensor, first: int, last: int) -> bool:
    size = tensor.block_rows * tensor.row_bytes
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return [content_hash(part) for part in parts] == list(tensor.blocks[first:last])


def has_block(path: Path, tensor: BlockedTensor, number: int) -> bool:
    """Returns whether this host's file has this block of the tensor."""
    data = _read_range(path, *_range_of(tensor, number, number + 1))
    return data is not None and _are_blocks(data, tensor, number, number + 1)
