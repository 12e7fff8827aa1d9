"""Describes the model that a run starts from, as the run's store holds it (`ModelManifest`), by
hashing the files of a Hugging Face folder (`describe_model`).

    model/<digest>/config.json …   the files of the model's folder and of the tokenizer, byte for
                                   byte but for byte order marks, and the task's files
    model/manifest.json            created last, with the hash of every file and block of rows

A range of a tensor's rows is verified by the hashes of the blocks that it touches, so a process
that reads some rows reads little more than these.
"""

import json
import math
import mmap
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.foreign_json import parse_loose_json
from rollstream.storage.hf_folder import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    BOM,
    TEMPLATES,
    is_lfs_pointer,
    lfs_refusal,
    small_files,
)
from rollstream.storage.hf_weights import HEADER_BYTES_MAX, INDEX, hf_weight_files
from rollstream.storage.stores.base import ObjectStore, content_hash, is_key
from rollstream.storage.stores.json_objects import FORMAT, decode_json
from rollstream.storage.stores.run_keys import LEASES, RunKeys
from rollstream.storage.weights.delta.coding import ELEMENTS
from rollstream.storage.weights.manifest import FileEntry, Size

MODEL_PREFIX = "model/"
MODEL_KEY = f"{MODEL_PREFIX}manifest.json"
TOKENIZER, ADAPTER, TASK = "tokenizer/", "adapter/", "task/"
"""Prefixes of the names of a tokenizer's files (`task.tokenizer`), of the files of an adapter
(`model.lora.path`), and of a task's files.
"""
RUN_KEYS = (
    RunKeys(
        re.compile(
            rf"{MODEL_PREFIX}[0-9a-f]{{16}}/"
            rf"(?:{TASK}\d+(?:\.[^/]+)?|(?:{TOKENIZER}|{ADAPTER})?(?P<file>(?:{TEMPLATES}/)?[^/]+))"
        ),
        "later",
        "any",
    ),
    # Deleted late: it names files of the other folders.
    RunKeys(re.compile(re.escape(MODEL_KEY)), "later", "any", LEASES),
)
TASK_BYTES_MAX = 1 << 30
"""A task's file above this size is not stored: each host that reads it needs its own."""
BLOCK_BYTES, BLOCK_BYTES_MIN, BLOCKS_MIN = 1 << 20, 64 << 10, 64
"""A block of rows with a hash of its own is a 64th of its tensor, within these sizes."""


@dataclass(frozen=True, slots=True)
class BlockedTensor:
    """States that a tensor is at the bytes `[start, end)` of a file. Each of `blocks` is the hash
    of the next `block_rows` rows.
    """

    file: str
    start: Size
    end: Size
    dtype: str
    shape: tuple[Size, ...]
    block_rows: Size
    blocks: tuple[str, ...]

    @property
    def rows(self) -> int:
        """The size of the first dimension; a number without dimensions has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return (self.end - self.start) // max(1, self.rows)


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """Lists the files of a run's starting model in the folder `model/<digest>/`, and the tensors in
    them. `digest` is a hash of the names and hashes of all files. `task_files` maps a path as the
    settings give it to the file's name, or to `TOKENIZER` or `ADAPTER` for a folder of these.
    """

    run: str
    digest: str
    created_s: float
    files: tuple[FileEntry, ...]
    tensors: dict[str, BlockedTensor]
    task_files: dict[str, str]
    format: int = FORMAT

    def key(self, name: str) -> str:
        """Returns the key of a file's object."""
        return f"{MODEL_PREFIX}{self.digest}/{name}"

    def entry(self, name: str) -> FileEntry:
        """Returns a file's entry; raises `ObjectMissing` if the model has no such file."""
        found = next((entry for entry in self.files if entry.name == name), None)
        if found is None:
            raise ObjectMissing(f"the run's model has no file {name} ({MODEL_KEY})")
        return found

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Names the files of a model on this host: its Hugging Face folder, and the paths that the
    settings give. Without `has_weights` the folder has only configuration and tokenizer.
    """

    folder: Path
    tokenizer: str | None = None
    task_files: tuple[str, ...] = ()
    has_weights: bool = True
    adapter: str | None = None

    def files(self) -> dict[str, Path]:
        """Returns the paths of all files by their names in the store. Raises `ConfigurationError`
        if a weight file is missing.
        """
        found = small_files(self.folder)
        if self.has_weights:
            found |= {path.name: path for path in hf_weight_files(self.folder).values()}
            if (self.folder / INDEX).is_file():
                found[INDEX] = self.folder / INDEX
        if self.tokenizer is not None:
            own = small_files(Path(self.tokenizer).expanduser())
            found |= {f"{TOKENIZER}{name}": path for name, path in own.items()}
        if self.adapter is not None:
            own = Path(self.adapter).expanduser()
            names = (ADAPTER_CONFIG, ADAPTER_TENSORS)
            found |= {f"{ADAPTER}{name}": own / name for name in names}
        own = {name: Path(given).expanduser() for given, name in self.named_task_files().items()}
        return found | own

    def named_task_files(self) -> dict[str, str]:
        """Returns the name in the store of each of the task's files, by its path in the
        settings.
        """
        return {
            given: f"{TASK}{number}{_kind(Path(given))}"
            for number, given in enumerate(self.task_files)
        }

    def path_names(self) -> dict[str, str]:
        """Returns what `ModelManifest.task_files` holds."""
        tokenizer = {} if self.tokenizer is None else {self.tokenizer: TOKENIZER}
        adapter = {} if self.adapter is None else {self.adapter: ADAPTER}
        return self.named_task_files() | tokenizer | adapter


def _kind(path: Path) -> str:
    """Returns the suffix by which a reader knows the kind of a file, with that of a compressed one
    in front.
    """
    before = path.with_suffix("").suffix if path.suffix.lower() in (".gz", ".zst") else ""
    return f"{before if before.isascii() and before[1:].isalnum() else ''}{path.suffix}"


def describe_model(source: ModelSource, run: str, created_s: float) -> ModelManifest:
    """Hash every file of a model; returns its manifest, which is not written."""
    files: list[FileEntry] = []
    tensors: dict[str, BlockedTensor] = {}
    for name, path in sorted(source.files().items()):
        with stored_bytes(name, path) as data:
            files.append(FileEntry(name, len(data), content_hash(data)))
            if is_weights(name):
                tensors |= _blocked_tensors(name, path, data)
    names = source.path_names()
    identity = [[entry.name, entry.hash] for entry in files], sorted(names.values())
    digest = content_hash(json.dumps(identity).encode())[:16]
    return ModelManifest(run, digest, created_s, tuple(files), tensors, names)


def read_model_manifest(store: ObjectStore) -> ModelManifest | None:
    """Returns the manifest of the run's starting model; None if the store has none. Raises
    `NewerRelease` if its format is newer than this release, `CorruptObject` if it is damaged.
    """
    try:
        data = store.get(MODEL_KEY)
    except ObjectMissing:
        return None
    found = decode_json(data, ModelManifest, MODEL_KEY)
    for entry in found.files:  # names become paths on this host
        if not is_key(entry.name):
            raise CorruptObject(f"object {MODEL_KEY} names the file {entry.name!r}")
    sizes = {entry.name: entry.bytes for entry in found.files}
    for name, tensor in found.tensors.items():
        if not _is_sound(tensor, sizes):
            raise CorruptObject(
                f"object {MODEL_KEY}: its entry of tensor {name} contradicts itself"
            )
    return found


def _is_sound(tensor: BlockedTensor, sizes: Mapping[str, int]) -> bool:
    """Returns whether a tensor is within its file, has the size of its shape, and has a hash for
    each of its blocks. Sizes of dtypes that no reader here knows are not compared.
    """
    size, rows = tensor.end - tensor.start, tensor.rows
    if not size >= 0 or tensor.end > sizes.get(tensor.file, -1) or not tensor.block_rows:
        return False
    element = ELEMENTS.get(tensor.dtype)
    if element is not None and size != math.prod(tensor.shape) * element.bytes:
        return False
    if not size:
        return not tensor.blocks
    if not rows or size % rows:
        return False
    return len(tensor.blocks) == math.ceil(rows / tensor.block_rows)


def of_model(name: str) -> bool:
    """Returns whether this is the name of a file in the model's own folder."""
    return not name.startswith((TOKENIZER, ADAPTER, TASK))


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


@contextmanager
def mapped_bytes(path: Path) -> Generator[memoryview]:
    """Yield the file's bytes, which the kernel reads page by page."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages, memoryview(pages) as at:
            yield at


@contextmanager
def stored_bytes(name: str, path: Path) -> Generator[memoryview]:
    """Yield the bytes that the store holds of the file with this name: those of the file, but a
    configuration or tokenizer file without its byte order mark, which its readers refuse. Raises
    `ConfigurationError` for a pointer of Git LFS in place of a file of the model.
    """
    with mapped_bytes(path) as data:
        is_model = not name.startswith(TASK)
        if is_model and is_lfs_pointer(bytes(data[:64])):
            raise ConfigurationError(f"model.path: {lfs_refusal(path)}")
        has_mark = is_model and not is_weights(name) and bytes(data[: len(BOM)]) == BOM
        with data[len(BOM) if has_mark else 0 :] as content:
            yield content


def _blocked_tensors(name: str, path: Path, data: memoryview) -> dict[str, BlockedTensor]:
    """Returns the tensors of a safetensors file with the hashes of their blocks."""
    try:
        size = int.from_bytes(data[:8], "little")
        header: dict[str, Any] = parse_loose_json(bytes(data[8 : 8 + min(size, HEADER_BYTES_MAX)]))
        header.pop("__metadata__", None)
        found: dict[str, BlockedTensor] = {}
        for tensor, entry in header.items():
            start, end = (8 + size + int(offset) for offset in entry["data_offsets"])
            if not 0 <= start <= end <= len(data):
                raise ValueError(f"{tensor} is outside the file")
            found[tensor] = _blocked(name, start, end, entry, data)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(
            f"model.path: {path} cannot be read as a safetensors file: {error!r}"
        ) from error
    return found


def rows_per_block(rows: int, row_bytes: int) -> int:
    """Returns the height of a tensor's blocks. Where the rows allow it there are 64 of them or a
    larger power of two, so that the shares of 2, 4, 8 … ranks begin and end at blocks.
    """
    size = min(max(rows * row_bytes // BLOCKS_MIN, BLOCK_BYTES_MIN), BLOCK_BYTES)
    wanted, blocks = max(1, size // max(1, row_bytes)), 1
    while rows % (2 * blocks) == 0 and rows // blocks > wanted:
        blocks *= 2
    return rows // blocks if 0 < rows // blocks <= wanted else wanted


def _blocked(
    file: str, start: int, end: int, entry: Mapping[str, Any], data: memoryview
) -> BlockedTensor:
    shape = tuple(int(size) for size in entry["shape"])
    rows = shape[0] if shape else 1
    row_bytes = (end - start) // max(1, rows)
    block_rows = rows_per_block(rows, row_bytes)
    step = max(1, block_rows * row_bytes)
    blocks = tuple(content_hash(data[at : min(at + step, end)]) for at in range(start, end, step))
    return BlockedTensor(file, start, end, str(entry["dtype"]), shape, block_rows, blocks)


def is_same(path: Path, entry: FileEntry) -> bool:
    """Returns whether the file exists here with exactly the content of this entry."""
    try:
        if path.stat().st_size != entry.bytes:
            return False
        with mapped_bytes(path) as data:
            return content_hash(data) == entry.hash
    except OSError:
        return False
