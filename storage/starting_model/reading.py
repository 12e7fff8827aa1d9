"""Reads the model that a run starts from on any host (`StoredModel`), so that no role needs a
model's folder of its own: files, or rows of a tensor.

A file on this host is used in place of an object only if it has the same bytes. Everything is
verified by its hash before it is returned, and a damaged object is refused by name (invariant 6).
Needs no torch; `rows.py` makes tensors of the rows.
"""

import logging
import math
import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from rollstream.errors import CorruptObject
from rollstream.storage.hf_folder import GENERATION, TEMPLATES, small_files
from rollstream.storage.hf_tokenizer import is_tokenizer_file
from rollstream.storage.hf_weights import INDEX
from rollstream.storage.starting_model.manifest import (
    ADAPTER,
    MODEL_KEY,
    BlockedTensor,
    ModelManifest,
    is_same,
    of_model,
)
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.manifest import FileEntry

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Most bytes of a tensor or file that are read at a time, unless one block is larger."""


@dataclass(slots=True)
class StoredModel:
    """Reads the run's starting model: a file or block from the first of `folders` on this host that
    has the same bytes, else from the store. Everything is verified by its hash before it is
    returned; a damaged object raises `CorruptObject`, which names it.
    """

    store: ObjectStore
    manifest: ModelManifest
    folders: tuple[Path, ...] = ()
    store_bytes: int = 0
    """Bytes read from the store."""
    _other: set[Path] = field(default_factory=set[Path])
    """Files on this host that turned out to be other ones."""

    def fetch(self, name: str) -> bytes:
        """Returns the content of a file."""
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
        """Yields the rows `[start, stop)` of a tensor in consecutive pieces: the number of the
        piece's first row, and its bytes. Only the blocks with these rows are read.
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
        """Returns the bytes of blocks `[first, last)` of a tensor, verified."""
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

    def host_folder(self, prefix: str, given: Path | None, cache: Path) -> Path:
        """Returns a folder on this host with the small files of this prefix ("" for the model's
        own): `given` if its files are the same, else a folder in `cache`, in which missing files
        and other ones are replaced. Every file is compared with its hash at each call.
        """
        entries = [entry for entry in self.manifest.files if _is_small(entry.name, prefix)]
        names = {entry: entry.name.removeprefix(prefix) for entry in entries}
        if given is not None:
            is_whole = all(is_same(given / name, entry) for entry, name in names.items())
            if is_whole and not _has_more(given, names.values()):
                return given
            if given.exists() and given != cache / prefix:
                log.warning("%s is not the run's model: files of the run's store are used", given)
        return self._kept(entries, prefix, cache)

    @property
    def has_adapter(self) -> bool:
        """Whether the run starts from an adapter, which its store has."""
        return any(entry.name.startswith(ADAPTER) for entry in self.manifest.files)

    def adapter_folder(self, given: Path, cache: Path) -> Path:
        """Returns a folder on this host with the adapter's files: `given` if they are the same."""
        entries = [entry for entry in self.manifest.files if entry.name.startswith(ADAPTER)]
        if all(is_same(given / entry.name.removeprefix(ADAPTER), entry) for entry in entries):
            return given
        return self._kept(entries, ADAPTER, cache)

    def _kept(self, entries: Sequence[FileEntry], prefix: str, cache: Path) -> Path:
        for entry in entries:
            self.write_file(entry, cache / entry.name)
        return cache / prefix

    def host_file(self, name: str, given: Path, cache: Path) -> Path:
        """Returns a file of the task on this host: `given` if it is the same, else the one in
        `cache`, as `host_folder` does.
        """
        entry = self.manifest.entry(name)
        if is_same(given, entry):
            return given
        if given.exists():
            log.warning("%s is not the file of the run's task: the store's is used", given)
        self.write_file(entry, cache / name)
        return cache / name

    def whole_folder(self) -> Path | None:
        """Returns the first folder on this host that has every file of the model, weights too."""
        entries = [entry for entry in self.manifest.files if of_model(entry.name)]
        for folder in self.folders:
            if all(is_same(folder / entry.name, entry) for entry in entries):
                return folder
        return None

    def write_folder(self, folder: Path) -> Path:
        """Write every file of the model, weights too, into this folder; files that are there with
        the same content stay. Returns the folder.
        """
        for entry in self.manifest.files:
            if of_model(entry.name):
                self.write_file(entry, folder / entry.name)
        return folder

    def write_file(self, entry: FileEntry, path: Path) -> None:
        """Write a file unless it is there: piece by piece under another name, which it changes only
        once its hash is right.
        """
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


def _is_small(name: str, prefix: str) -> bool:
    """Returns whether this is a file of the prefix that roles read beside the weights."""
    rest = name.removeprefix(prefix)
    is_weights = rest.endswith((".safetensors", INDEX))
    is_below = name.startswith(prefix) and (bool(prefix) or of_model(name))
    return is_below and not is_weights


def _has_more(folder: Path, names: Collection[str]) -> bool:
    """Returns whether the folder has files beside these that its readers would read too. Further
    chat templates do not count in a run that an earlier release began without them.
    """
    has_templates = any(name.startswith(TEMPLATES) for name in names)
    return any(
        (is_tokenizer_file(name) or name == GENERATION)
        and name not in names
        and (has_templates or not name.startswith(TEMPLATES))
        for name in small_files(folder)
    )


def _read_range(path: Path, start: int, end: int) -> memoryview | None:
    """Returns these bytes of the file; None if it does not exist or is shorter."""
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), end - start, start)
    except OSError:
        return None
    return memoryview(data) if len(data) == end - start else None


def _range_of(tensor: BlockedTensor, first: int, last: int) -> tuple[int, int]:
    """Returns the range of blocks `[first, last)` in the tensor's file."""
    size = tensor.block_rows * tensor.row_bytes
    return tensor.start + first * size, min(tensor.start + last * size, tensor.end)


def _are_blocks(data: memoryview, tensor: BlockedTensor, first: int, last: int) -> bool:
    size = tensor.block_rows * tensor.row_bytes
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return [content_hash(part) for part in parts] == list(tensor.blocks[first:last])


def has_block(path: Path, tensor: BlockedTensor, number: int) -> bool:
    """Returns whether the file on this host has this block of the tensor."""
    data = _read_range(path, *_range_of(tensor, number, number + 1))
    return data is not None and _are_blocks(data, tensor, number, number + 1)
