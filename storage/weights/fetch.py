"""Fetches the tensors of a weight version from the store. Complete tensors are verified against
their hashes before they are returned (invariant 6).

`fetch_tensors` returns complete tensors. `export_version` writes a folder that transformers and
vLLM load (tensors, an index, the model's files), or the folder of an adapter alone, which PEFT
loads. The folder appears in one step, when it is complete.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.foreign_json import parse_json
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    TensorFiles,
    version_folder,
)
from rollstream.storage.weights.publish import SHARD_INDEX, shard_index
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.shards import packed_shards
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Version

CONFIGURATIONS = ("config.json", "adapter_config.json")
"""The files without which a loader takes a folder for no model."""


def fetch_tensors(
    store: ObjectStore,
    version: Version,
    manifest_hash: str | None = None,
    tensors: Iterable[str] | None = None,
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Returns the manifest of a version and its tensors named in `tensors` (default: all),
    verified. If the version is a delta, each tensor is made from the anchor's and the changes
    since.

    Pass the manifest's hash from the announcement to get exactly the announced version. The caller
    owns the memory; the names of tied weights share it. Raises `ObjectMissing` if the version, one
    that it is based on, or one of the tensors does not exist (any more), and `CorruptObject`, which
    names the tensor and the file, if bytes differ from their hash; then nothing is returned.
    """
    held = ResidentWeights(tensors)
    manifest = held.update(store, version, manifest_hash).manifest
    return manifest, held.tensors


def fetch_model_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """Returns one of the model's files (`config.json`, the tokenizer's), verified. The store keeps
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
    raises. After any failure the folder is as it was before. A folder that exists stays, because it
    may be a mount: the files are written inside and then get their names, the configuration last.
    """
    _check_empty(folder)
    is_there = folder.exists()
    place = folder if is_there else folder.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=place))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from None
    try:
        manifest, tensors = fetch_tensors(store, version)
        if form_of(manifest).is_partial and not merged:
            for file in manifest.files:
                (partial / file.name).write_bytes(_fetch_file(store, version, file))
        else:
            _write_model(store, manifest, tensors, partial, shard_bytes)
        if is_there:
            _move_up(partial)
        else:
            partial.chmod(0o777 & ~_umask())
            os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    paths = (path for path in folder.rglob("*") if path.is_file())
    files = sorted(str(path.relative_to(folder)) for path in paths)
    return ExportedVersion(
        version, folder, tuple(files), sum((folder / name).stat().st_size for name in files)
    )


def _move_up(partial: Path) -> None:
    """Move what is in the folder into the one above, and remove it. After a failure nothing that
    was moved is left. Raises `ConfigurationError` if the folder above has other files meanwhile.
    """
    above, moved = partial.parent, list[Path]()
    try:
        for path in sorted(partial.iterdir(), key=lambda path: path.name in CONFIGURATIONS):
            _check_empty(above, but=(partial, *moved))
            moved.append(above / path.name)
            os.replace(path, moved[-1])
        partial.rmdir()
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _write_model(
    store: ObjectStore,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    folder: Path,
    shard_bytes: int,
) -> None:
    kept, tied = untie(form_of(manifest).model_tensors(store, manifest, tensors))
    entries: dict[str, TensorEntry] = {}
    for file, data, placed in packed_shards(kept, "model", shard_bytes):
        (folder / file).write_bytes(data)
        entries.update(placed)
    (folder / SHARD_INDEX).write_bytes(shard_index(TensorFiles((), entries, tied)))
    for entry in manifest.model_files:
        if entry.name != SHARD_INDEX:
            path = folder / entry.name
            path.parent.mkdir(exist_ok=True)
            data = fetch_model_file(store, manifest, entry.name)
            path.write_bytes(_stated(data, kept) if entry.name == "config.json" else data)


def _stated(config: bytes, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the content of `config.json` with the type that most numbers of the tensors have:
    loaders take it for the model's.
    """
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    try:
        fields = parse_json(config, dict[str, object])
    except ValueError:
        return config
    stated = numbers.most_common(1)[0][0] if numbers else None
    if stated is None or fields.get("dtype", fields.get("torch_dtype")) == stated:
        return config
    fields.pop("torch_dtype", None)
    return (json.dumps({**fields, "dtype": stated}, indent=2) + "\n").encode()


def _check_empty(folder: Path, but: Collection[Path] = ()) -> None:
    if folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {*but}):
        raise ConfigurationError(
            f"{folder} is not empty, and nothing in it is replaced: give a new or empty folder"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
