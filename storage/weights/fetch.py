"""Fetches any tensors of a weight version, each verified before it is returned (invariant 6).

`fetch_tensors` returns whole tensors. `fetch_rows` fetches rows of one tensor straight from the
store, for a tensor-parallel rank that needs a slice. `export_version` writes a folder that
transformers and vLLM load (complete tensors, an index, the model's files), or the folder of an
adapter alone, which PEFT loads. The folder appears in one step, when it is complete.
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

    The call reads these rows of the anchor's tensor by one range, and the complete payload of each
    delta since; changes outside the rows are dropped. It verifies the manifests (against the
    announced hash, and each against its child), every payload, and that sizes fit. The rows of the
    anchor cannot be verified, because the hash covers the complete tensor, unless all rows are
    requested. Raises as `fetch_tensors` does.
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
    """Holds bytes `[start, end)` of a tensor, updated step by step."""

    def __init__(self, entry: TensorEntry, start: int, end: int) -> None:
        self._entry, self._start, self._end = entry, start, end
        self.bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def begin(self, store: ObjectStore, step: FetchStep) -> None:
        """Start from the anchor's tensor, or from a payload that replaces all of it."""
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
        """Apply the changes of a sparse payload to these rows."""
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
    """Return the manifest of a version and these of its tensors (all by default), read by ranges.
    The tensors of a delta are made from the anchor and all changes since.

    Give the announced hash of the manifest to be sure of exactly the announced version. The caller
    owns the memory; tied names share it. Raises `ObjectMissing` if the version, its base or such a
    tensor does not (or no longer) exist, and `CorruptObject`, which names the tensor and the file;
    then nothing is returned.
    """
    held = ResidentWeights(tensors)
    manifest = held.update(store, version, manifest_hash).manifest
    return manifest, held.tensors


def fetch_model_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """Return one of the model's files (`config.json`, the tokenizer's), verified. They are stored
    with the anchor.
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
    """Names the files that were written and their folder; `bytes` is the size of all."""

    version: Version
    folder: Path
    files: tuple[str, ...]
    bytes: int


def export_version(
    store: ObjectStore, version: Version, folder: Path, shard_bytes: int, merged: bool = True
) -> ExportedVersion:
    """Write the version into `folder`, every tensor verified; raises as `fetch_tensors` does. An
    adapter is written as a whole model, or alone if not `merged`.

    Raises `ConfigurationError` if the folder is not empty. After any failure the folder is as it
    was before.
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
