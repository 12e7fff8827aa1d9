"""Returns verified tensors of a weight version (`fetch_tensors`, invariant 6), or writes a folder
that transformers, vLLM or PEFT load (`export_version`), in one step.
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
    """Returns a version's manifest and its `tensors` (default: all), verified. The caller owns the
    memory, which tied names share. Raises as `ResidentWeights.update`.
    """
    weights = ResidentWeights(tensors)
    manifest = weights.update(store, version, manifest_hash).manifest
    return manifest, weights.tensors


def fetch_model_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """Returns one of the model's files (`config.json`, the tokenizer's), verified; the anchor's
    folder has them.
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
    """Reports an export: the folder, its files, and their total size."""

    version: Version
    folder: Path
    files: tuple[str, ...]
    bytes: int


def export_version(
    store: ObjectStore, version: Version, folder: Path, shard_bytes: int, merged: bool = True
) -> ExportedVersion:
    """Write the version into `folder`, every tensor verified, in files of at most `shard_bytes`; an
    adapter merged into its base, or alone if not `merged`. Raises `ConfigurationError` if the
    folder is not empty, and as `fetch_tensors`. After any failure the folder is as before.
    """
    _check_empty(folder)
    # An existing folder may be a mount: it stays, and the files get their names inside it, the
    # configuration last.
    is_there = folder.exists()
    place = folder if is_there else folder.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=place))
    except OSError as error:
        # The error names the folder and not its temporary name.
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
            # `mkdtemp` gives the folder to its owner alone.
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
    """Move the folder's content into the one above, and remove it; after a failure nothing moved is
    left.
    """
    above, moved = partial.parent, list[Path]()
    try:
        for path in sorted(partial.iterdir(), key=lambda path: path.name in CONFIGURATIONS):
            # Another program may have written there meanwhile.
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
    untied, tied = untie(form_of(manifest).model_tensors(store, manifest, tensors))
    entries: dict[str, TensorEntry] = {}
    for file, data, placed in packed_shards(untied, "model", shard_bytes):
        (folder / file).write_bytes(data)
        entries.update(placed)
    (folder / SHARD_INDEX).write_bytes(shard_index(TensorFiles((), entries, tied)))
    for entry in manifest.model_files:
        if entry.name != SHARD_INDEX:
            path = folder / entry.name
            path.parent.mkdir(exist_ok=True)
            data = fetch_model_file(store, manifest, entry.name)
            path.write_bytes(_stated(data, untied) if entry.name == "config.json" else data)


def _stated(config: bytes, tensors: Mapping[str, torch.Tensor]) -> bytes:
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    try:
        fields = parse_json(config, dict[str, object])
    except ValueError:
        return config
    # Loaders take the configuration's type for the model's: that of most numbers.
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
