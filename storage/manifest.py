"""The object that completes a set of tensor files, for weight versions and checkpoints alike.

A manifest is created last, so files without one are a write that never ended. It holds all that a
reader needs to fetch any tensor by one range and to verify it, without opening a file first.
"""

import re
from dataclasses import dataclass
from typing import Literal

from storage.documents import decode, encode
from storage.hashing import content_hash
from storage.objects import ObjectStore
from streams.errors import CorruptObject
from streams.records import Version

_VERSION = re.compile(r"v(\d{8,})-t(\d{4,})")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One object of the folder: its name in it, size and content hash."""

    name: str
    bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Bytes `[start, end)` of a file; `hash` covers dtype, shape and bytes."""

    file: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    hash: str


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Tensors in the files of one folder; a tied name is the same tensor as the one it names."""

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies, under whichever of its names; `KeyError` if it is not there."""
        return self.tensors[self.tied.get(name, name)]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.tensors, *self.tied)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole weight version.

    `parent` is the version one step before, `anchor` the nearest full one.
    """

    run: str
    version: Version
    parent: Version | None
    anchor: Version
    kind: Literal["anchor", "delta"]
    created_s: float
    weights: TensorFiles
    model_files: tuple[FileEntry, ...]

    @property
    def hash(self) -> str:
        """Hash of the manifest object; the identity of everything in the version."""
        return content_hash(encode(self))

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in (*self.weights.files, *self.model_files))


def version_folder(version: Version) -> str:
    return f"weights/{version}"


def parse_version(name: str) -> Version | None:
    """The version whose folder has this name, None for any other name."""
    match = _VERSION.fullmatch(name)
    return Version(int(match[1]), int(match[2])) if match else None


def manifest_key(version: Version) -> str:
    return f"{version_folder(version)}/manifest.json"


def read_manifest(
    store: ObjectStore, version: Version, manifest_hash: str | None = None
) -> Manifest:
    """The manifest of a version.

    `ObjectMissing` if it has none, `CorruptObject` if it is another than the announced hash.
    """
    key = manifest_key(version)
    data = store.get(key)
    if manifest_hash is not None and content_hash(data) != manifest_hash:
        raise CorruptObject(
            f"object {key} has hash {content_hash(data)}, announced {manifest_hash}"
        )
    manifest = decode(data, Manifest, key)
    if manifest.version != version:
        raise CorruptObject(f"object {key} says that it is version {manifest.version}")
    return manifest
