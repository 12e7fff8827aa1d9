"""Exports a version as a folder that transformers and vLLM load: complete tensors, an index, the
model's files.

The folder appears at once, when it is complete.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch import fetch_model_file, fetch_tensors
from rollstream.storage.weights.manifest import TensorEntry, TensorFiles
from rollstream.storage.weights.publish import SHARD_INDEX, shard_index
from rollstream.storage.weights.shards import pack_tensors, plan_shards, shard_name
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class ExportedVersion:
    """The files that were written, and their folder."""

    version: Version
    folder: Path
    files: tuple[str, ...]
    bytes: int


def export_version(
    store: ObjectStore, version: Version, folder: Path, shard_bytes: int
) -> ExportedVersion:
    """Write the version into `folder`, every tensor verified; raises as `fetch_tensors` does.

    Raises `ConfigurationError` if the folder is not empty. After any failure it is as it was
    before.
    """
    _check_empty(folder)
    manifest, tensors = fetch_tensors(store, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        kept, tied = untie(tensors)
        shards = plan_shards({name: tensor.nbytes for name, tensor in kept.items()}, shard_bytes)
        entries: dict[str, TensorEntry] = {}
        for number, names in enumerate(shards, start=1):
            file = shard_name("model", number, len(shards))
            data, placed = pack_tensors({name: kept[name] for name in names}, file)
            (partial / file).write_bytes(data)
            entries.update(placed)
        (partial / SHARD_INDEX).write_bytes(shard_index(TensorFiles((), entries, tied)))
        for entry in manifest.model_files:
            if entry.name != SHARD_INDEX:
                (partial / entry.name).write_bytes(fetch_model_file(store, manifest, entry.name))
        partial.chmod(0o777 & ~_umask())
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    files = sorted(path.name for path in folder.iterdir())
    return ExportedVersion(
        version, folder, tuple(files), sum((folder / name).stat().st_size for name in files)
    )


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"{folder} is not empty and nothing in it is replaced: name a new folder"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
