"""Fetches the tensors of a weight version from the store. Complete tensors are verified against
their hashes before they are returned (invariant 6).

`fetch_tensors` returns complete tensors. `fetch_rows` returns some rows of one tensor, for a
tensor-parallel rank, and verifies what can be verified of them. `export_version` writes a folder
that transformers and vLLM load (tensors, an index, the model's files), or the folder of an adapter
alone, which PEFT loads. The folder appears in one step, when it is complete.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.adapters import whole_tensors
from rollstream.storage.weights.anchors import find_fetch_paths
from rollstream.storage.weights.delta.codec import apply_tensor
from rollstream.storage.weights.delta.coding import element_of
from rollstream.storage.weights.delta.sparse import decode_sparse
from rollstream.storage.weights.fetch_plan import FetchStep
from rollstream.storage.weights.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    TensorFiles,
    read_manifest,
    version_folder,
)
from rollstream.storage.weights.publish import SHARD_INDEX, shard_index
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.shards import packed_shards
from rollstream.storage.weights.tensors import DTYPES, tensor_hash, tensor_of, untie
from rollstream.streams.values import Version


def fetch_rows(
    store: ObjectStore,
    version: Version,
    name: str,
    start: int,
    stop: int,
    manifest_hash: str | None = None,
) -> torch.Tensor:
    """Return rows `[start, stop)` of the tensor's first dimension, in memory that the caller owns.

    The call reads only these rows of the anchor's tensor, and then the complete payload (changed
    elements) of each delta after the anchor; changes of other rows are dropped. It verifies the
    version's manifest against `manifest_hash`, the announced hash, if given, each older manifest
    against the hash in the manifest of its child, every payload against its hash, and all sizes.
    The rows read from the anchor are not verified, because a hash covers a complete tensor; only if
    all rows are requested is the result verified. Raises as `fetch_tensors` does.
    """
    manifest = read_manifest(store, version, manifest_hash)
    if name not in manifest.weights.names:
        raise ObjectMissing(f"version {version} has no tensor {name}")
    owner = manifest.weights.owner(name)
    entry = manifest.weights.tensors[owner]
    assert entry.shape, f"{name} has no rows"
    assert 0 <= start <= stop <= entry.shape[0], (name, entry.shape, start, stop)
    if start == stop or not entry.bytes:
        return torch.empty((stop - start, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    row_bytes = entry.bytes // entry.shape[0]
    first, *deltas = find_fetch_paths(store, manifest, [owner])[owner].steps
    rows = _TensorRows(entry, start * row_bytes, stop * row_bytes)
    rows.begin(store, first)
    for step in deltas:
        rows.change(_payload(store, step), step)
    is_all = (start, stop) == (0, entry.shape[0])
    if is_all and tensor_hash(entry.dtype, entry.shape, rows.bytes.data) != entry.hash:
        raise CorruptObject(f"tensor {owner} of version {version} differs from its hash")
    return tensor_of(rows.bytes.data, entry.dtype, (stop - start, *entry.shape[1:]))


class _TensorRows:
    """Holds the bytes `[start, end)` of a tensor. `begin` reads them by the first step of its fetch
    path (an anchor, or a delta that replaces the tensor); `change` then applies each later delta.
    """

    def __init__(self, entry: TensorEntry, start: int, end: int) -> None:
        self._entry, self._start, self._end = entry, start, end
        self.bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def begin(self, store: ObjectStore, step: FetchStep) -> None:
        """Read the bytes from the anchor's tensor, or from a delta that replaces all of it."""
        size = step.entry.bytes
        if size != self._entry.bytes or step.entry.dtype != self._entry.dtype:
            raise CorruptObject(f"tensor {step.name} of version {step.version}: its size differs")
        if step.delta is not None:
            whole = np.empty(size, np.uint8)
            payload = _payload(store, step)
            apply_tensor(step.delta.coding, step.delta.values, payload, whole, step.entry.dtype)
            self.bytes = whole[self._start : self._end].copy()
            return
        key = f"{version_folder(step.version)}/{step.file}"
        data = store.get(key, step.start + self._start, step.start + self._end)
        if len(data) != self._end - self._start:
            raise CorruptObject(f"object {key} ends before tensor {step.name} does")
        self.bytes = np.array(np.frombuffer(data, np.uint8))

    def change(self, payload: bytes, step: FetchStep) -> None:
        """Apply a delta's changes of these bytes; `payload` lists changed elements (sparse)."""
        assert step.delta is not None, "a path starts with at most one complete tensor"
        element = element_of(self._entry.dtype)
        width = element.bits.itemsize
        # Zeros that are only read take no memory; the changes decoded from them are dropped.
        whole = np.zeros(self._entry.bytes, np.uint8)
        whole[self._start : self._end] = self.bytes
        changes = decode_sparse(payload, whole.view(element.bits), step.delta.values, element)
        first, end = self._start // width, self._end // width
        low, high = np.searchsorted(changes.indices, [first, end])
        bits = self.bytes.view(element.bits)
        bits[changes.indices[low:high] - first] = changes.values[low:high]


def _payload(store: ObjectStore, step: FetchStep) -> bytes:
    """Return the bytes of a delta of one tensor, verified against their hash."""
    assert step.delta is not None
    if step.end == step.start:
        return b""
    key = f"{version_folder(step.version)}/{step.file}"
    data = store.get(key, step.start, step.end)
    if content_hash(data) != step.delta.payload:
        raise CorruptObject(f"tensor {step.name} in object {key} differs from its hash")
    return data


def fetch_tensors(
    store: ObjectStore,
    version: Version,
    manifest_hash: str | None = None,
    tensors: Iterable[str] | None = None,
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return the manifest of a version and its tensors named in `tensors` (default: all), verified.
    If the version is a delta, each tensor is made from the anchor's and the changes since.

    Pass the manifest's hash from the announcement to get exactly the announced version. The caller
    owns the memory; the names of tied weights share it. Raises `ObjectMissing` if the version, one
    that it is based on, or one of the tensors does not exist (any more), and `CorruptObject`, which
    names the tensor and the file, if bytes differ from their hash; then nothing is returned.
    """
    held = ResidentWeights(tensors)
    manifest = held.update(store, version, manifest_hash).manifest
    return manifest, held.tensors


def fetch_model_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """Return one of the model's files (`config.json`, the tokenizer's), verified. The store keeps
    these files with the anchor of the version.
    """
    entry = next((entry for entry in manifest.model_files if entry.name == name), None)
    if entry is None:
        raise ObjectMissing(f"version {manifest.version} has no file {name}")
    return _fetch_file(store, manifest.anchor, entry)


def _fetch_file(store: ObjectStore, version: Version, entry: FileEntry) -> bytes:
    key = f"{version_folder(version)}/{entry.name}"
    data = store.get(key)
    if content_hash(data) != entry.hash:
        raise CorruptObject(f"object {key} differs from the hash in its manifest")
    return data


@dataclass(frozen=True, slots=True)
class ExportedVersion:
    """Reports an export: the folder, the files written there, and their total size in `bytes`."""

    version: Version
    folder: Path
    files: tuple[str, ...]
    bytes: int


def export_version(
    store: ObjectStore, version: Version, folder: Path, shard_bytes: int, merged: bool = True
) -> ExportedVersion:
    """Write the version into `folder`, every tensor verified; `shard_bytes` bounds a file. A
    version that is an adapter is merged into its base and written as a whole model, or written
    alone if not `merged`.

    Raises `ConfigurationError` if the folder exists and is not empty, and all that `fetch_tensors`
    raises. After any failure the folder is as it was before.
    """
    _check_empty(folder)
    manifest, tensors = fetch_tensors(store, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        if manifest.adapter and not merged:
            for file in manifest.files:
                (partial / file.name).write_bytes(_fetch_file(store, version, file))
        else:
            _write_model(store, manifest, tensors, partial, shard_bytes)
        partial.chmod(0o777 & ~_umask())
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    files = sorted(path.name for path in folder.iterdir())
    return ExportedVersion(
        version, folder, tuple(files), sum((folder / name).stat().st_size for name in files)
    )


def _write_model(
    store: ObjectStore,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    folder: Path,
    shard_bytes: int,
) -> None:
    kept, tied = untie(whole_tensors(store, manifest, tensors))
    entries: dict[str, TensorEntry] = {}
    for file, data, placed in packed_shards(kept, "model", shard_bytes):
        (folder / file).write_bytes(data)
        entries.update(placed)
    (folder / SHARD_INDEX).write_bytes(shard_index(TensorFiles((), entries, tied)))
    for entry in manifest.model_files:
        if entry.name != SHARD_INDEX:
            (folder / entry.name).write_bytes(fetch_model_file(store, manifest, entry.name))


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"{folder} is not empty and nothing in it is replaced: name a new folder"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
