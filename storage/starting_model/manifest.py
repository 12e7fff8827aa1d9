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
from rollstream.storage.model_folder.hf_folder import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    BOM,
    TEMPLATES,
    is_lfs_pointer,
    lfs_refusal,
    small_files,
)
from rollstream.storage.model_folder.hf_weights import HEADER_BYTES_MAX, INDEX, hf_weight_files
from rollstream.storage.stores.base import ObjectStore, content_hash, is_key
from rollstream.storage.stores.json_objects import FORMAT, decode_json
from rollstream.storage.stores.run_keys import LEASES, RunKeys
from rollstream.storage.weights.delta.coding import ELEMENTS
from rollstream.storage.weights.manifest import FileEntry, Size

MODEL_PREFIX = "model/"
MODEL_KEY = f"{MODEL_PREFIX}manifest.json"
TOKENIZER, ADAPTER, TASK = "tokenizer/", "adapter/", "task/"
"""Prefixes of the files of a tokenizer (`task.tokenizer`), an adapter (`model.lora.path`), and a
task.
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
"""A task's larger file is not stored: each host that reads it needs its own."""
BLOCK_BYTES, BLOCK_BYTES_MIN, BLOCKS_MIN = 1 << 20, 64 << 10, 64
"""A block of rows with a hash of its own is a 64th of its tensor, within these sizes."""


@dataclass(frozen=True, slots=True)
class BlockedTensor:
    """Locates a tensor at the bytes `[start, end)` of a file; each of `blocks` is the hash of the
    next `block_rows` rows.
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
        """Returns the first dimension's size, 1 without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return (self.end - self.start) // max(1, self.rows)


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """Lists the files of a run's starting model in `model/<digest>/`, and their tensors. `digest`
    is a hash of all names and hashes. `task_files` maps a path in the settings to the file's name,
    or to `TOKENIZER` or `ADAPTER` for their folders.
    """

    run: str
    digest: str
    created_s: float
    files: tuple[FileEntry, ...]
    tensors: dict[str, BlockedTensor]
    task_files: dict[str, str]
    format: int = FORMAT

    def key(self, name: str) -> str:
        return f"{MODEL_PREFIX}{self.digest}/{name}"

    def entry(self, name: str) -> FileEntry:
        """Returns a file's entry; raises `ObjectMissing` if the model has no such file."""
        file_entry = next((entry for entry in self.files if entry.name == name), None)
        if file_entry is None:
            raise ObjectMissing(f"the run's model has no file {name} ({MODEL_KEY})")
        return file_entry

    @property
    def bytes(self) -> int:
        """Returns the size of all files."""
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Names a model's files on this host: its Hugging Face folder, and paths of the settings.
    Without `has_weights` the folder has only configuration and tokenizer.
    """

    folder: Path
    tokenizer: str | None = None
    task_files: tuple[str, ...] = ()
    has_weights: bool = True
    adapter: str | None = None

    def files(self) -> dict[str, Path]:
        """Returns all paths by names in the store; raises `ConfigurationError` if a weight file is
        missing.
        """
        paths = small_files(self.folder)
        if self.has_weights:
            paths |= {path.name: path for path in hf_weight_files(self.folder).values()}
            if (self.folder / INDEX).is_file():
                paths[INDEX] = self.folder / INDEX
        if self.tokenizer is not None:
            tokenizer = small_files(Path(self.tokenizer).expanduser())
            paths |= {f"{TOKENIZER}{name}": path for name, path in tokenizer.items()}
        if self.adapter is not None:
            adapter = Path(self.adapter).expanduser()
            names = (ADAPTER_CONFIG, ADAPTER_TENSORS)
            paths |= {f"{ADAPTER}{name}": adapter / name for name in names}
        task_paths = {
            name: Path(task_file).expanduser()
            for task_file, name in self.named_task_files().items()
        }
        return paths | task_paths

    def named_task_files(self) -> dict[str, str]:
        """Returns the stored name of each task file, by its path in the settings."""
        return {
            path: f"{TASK}{number}{_kind(Path(path))}"
            for number, path in enumerate(self.task_files)
        }

    def path_names(self) -> dict[str, str]:
        """Returns the content of `ModelManifest.task_files`."""
        tokenizer = {} if self.tokenizer is None else {self.tokenizer: TOKENIZER}
        adapter = {} if self.adapter is None else {self.adapter: ADAPTER}
        return self.named_task_files() | tokenizer | adapter


def _kind(path: Path) -> str:
    # A reader knows the kind of a compressed file by the suffix in front.
    before = path.with_suffix("").suffix if path.suffix.lower() in (".gz", ".zst") else ""
    return f"{before if before.isascii() and before[1:].isalnum() else ''}{path.suffix}"


def describe_model(source: ModelSource, run: str, created_s: float) -> ModelManifest:
    """Hash every file of a model; returns its unwritten manifest."""
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
    """Returns the manifest of the run's starting model, None without one. Raises `NewerRelease` if
    its format is newer, `CorruptObject` if it is damaged.
    """
    try:
        data = store.get(MODEL_KEY)
    except ObjectMissing:
        return None
    manifest = decode_json(data, ModelManifest, MODEL_KEY)
    for entry in manifest.files:
        # Names become paths on this host.
        if not is_key(entry.name):
            raise CorruptObject(f"object {MODEL_KEY} names the file {entry.name!r}")
    sizes = {entry.name: entry.bytes for entry in manifest.files}
    for name, tensor in manifest.tensors.items():
        if not _is_sound(tensor, sizes):
            raise CorruptObject(
                f"object {MODEL_KEY}: its entry of tensor {name} contradicts itself"
            )
    return manifest


def _is_sound(tensor: BlockedTensor, sizes: Mapping[str, int]) -> bool:
    size, rows = tensor.end - tensor.start, tensor.rows
    if not size >= 0 or tensor.end > sizes.get(tensor.file, -1) or not tensor.block_rows:
        return False
    element = ELEMENTS.get(tensor.dtype)
    # Readers here may not know a dtype.
    if element is not None and size != math.prod(tensor.shape) * element.bytes:
        return False
    if not size:
        return not tensor.blocks
    if not rows or size % rows:
        return False
    return len(tensor.blocks) == math.ceil(rows / tensor.block_rows)


def of_model(name: str) -> bool:
    """Returns whether the file is in the model's own folder."""
    return not name.startswith((TOKENIZER, ADAPTER, TASK))


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


@contextmanager
def mapped_bytes(path: Path) -> Generator[memoryview]:
    """Yield the file's bytes; the kernel reads them page by page."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages, memoryview(pages) as at:
            yield at


@contextmanager
def stored_bytes(name: str, path: Path) -> Generator[memoryview]:
    """Yield the file's bytes as the store holds them, without the byte order mark of a
    configuration or tokenizer file. Raises `ConfigurationError` for a Git LFS pointer in place of a
    model's file.
    """
    with mapped_bytes(path) as data:
        is_model = not name.startswith(TASK)
        if is_model and is_lfs_pointer(bytes(data[:64])):
            raise ConfigurationError(f"model.path: {lfs_refusal(path)}")
        # Readers refuse a byte order mark.
        has_mark = is_model and not is_weights(name) and bytes(data[: len(BOM)]) == BOM
        with data[len(BOM) if has_mark else 0 :] as content:
            yield content


def _blocked_tensors(name: str, path: Path, data: memoryview) -> dict[str, BlockedTensor]:
    try:
        size = int.from_bytes(data[:8], "little")
        header: dict[str, Any] = parse_loose_json(bytes(data[8 : 8 + min(size, HEADER_BYTES_MAX)]))
        header.pop("__metadata__", None)
        tensors: dict[str, BlockedTensor] = {}
        for tensor, entry in header.items():
            start, end = (8 + size + int(offset) for offset in entry["data_offsets"])
            if not 0 <= start <= end <= len(data):
                raise ValueError(f"{tensor} is outside the file")
            tensors[tensor] = _blocked(name, start, end, entry, data)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(
            f"model.path: {path} cannot be read as a safetensors file: {error!r}"
        ) from error
    return tensors


def rows_per_block(rows: int, row_bytes: int) -> int:
    """Returns the height of a tensor's blocks: 64 of them, or a larger power of two, where the rows
    allow it.
    """
    size = min(max(rows * row_bytes // BLOCKS_MIN, BLOCK_BYTES_MIN), BLOCK_BYTES)
    rows_max, blocks = max(1, size // max(1, row_bytes)), 1
    # So the shares of 2, 4, 8 … ranks begin and end at blocks.
    while rows % (2 * blocks) == 0 and rows // blocks > rows_max:
        blocks *= 2
    return rows // blocks if 0 < rows // blocks <= rows_max else rows_max


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
    """Returns whether the file exists with exactly this entry's content."""
    try:
        if path.stat().st_size != entry.bytes:
            return False
        with mapped_bytes(path) as data:
            return content_hash(data) == entry.hash
    except OSError:
        return False
