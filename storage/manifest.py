"""The object that completes a set of tensor files, for weight versions and checkpoints alike.

A manifest is created last, so files without one are a write that never ended. It holds all that a
reader needs to fetch any tensor by one range and to verify it, without opening a file first: of an
anchor the tensor's own bytes, of a delta what to change in the parent's tensor.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from storage.delta.coded import Coding, Values, element_of
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
    """Bytes `[start, end)` of a file; `hash` covers dtype, shape and bytes.

    `file` is "" where the folder does not hold the tensor whole: it follows from a delta.
    """

    file: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    hash: str

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Tensors in the files of one folder; a tied name is the same tensor as the one it names."""

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]

    def owner(self, name: str) -> str:
        """The name under which a tensor is kept, for any of its names."""
        return self.tied.get(name, name)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies, under whichever of its names; `KeyError` if it is not there."""
        return self.tensors[self.owner(name)]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.tensors, *self.tied)


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """What makes a tensor out of its parent's: a payload, bytes `[start, end)` of a file.

    `base` is the hash of the parent's tensor, "" where there is none (new or reshaped); `payload`
    the hash of the payload; `changed` counts elements. `same` has no payload, and no file.
    """

    base: str
    coding: Coding
    values: Values
    changed: int
    file: str
    start: int
    end: int
    payload: str

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Delta:
    """All tensors of a version as differences from the manifest that has `parent_hash`; a tied one
    once, under the name that the version keeps it.
    """

    parent_hash: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, DeltaEntry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole weight version.

    `parent` is the version one step before, `anchor` the nearest full one: itself for an anchor.
    An anchor may hold its `delta` too, for readers that have the parent. The model's files lie in
    the folder of the anchor.
    """

    run: str
    version: Version
    parent: Version | None
    anchor: Version
    kind: Literal["anchor", "delta"]
    created_s: float
    weights: TensorFiles
    model_files: tuple[FileEntry, ...]
    delta: Delta | None = None
    format: int | msgspec.UnsetType = msgspec.UNSET
    """Left out where the object has none, so that its hash stays what was announced."""

    @property
    def hash(self) -> str:
        """Hash of the manifest object; the identity of everything in the version."""
        return content_hash(encode(self))

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every object of the version's own folder but the manifest."""
        own = self.model_files if self.kind == "anchor" else ()
        return (*self.weights.files, *(self.delta.files if self.delta else ()), *own)

    @property
    def bytes(self) -> int:
        """Of its own folder."""
        return sum(entry.bytes for entry in self.files)

    @property
    def full_bytes(self) -> int:
        """Of all tensors, whole, tied ones once."""
        return sum(entry.bytes for entry in self.weights.tensors.values())


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
    _check(manifest, version, key)
    return manifest


def _check(manifest: Manifest, version: Version, key: str) -> None:
    """What every reader relies on; the rest is compared with hashes where it is used."""
    if manifest.version != version:
        raise CorruptObject(f"object {key} says that it is version {manifest.version}")
    parent, delta, tensors = manifest.parent, manifest.delta, manifest.weights.tensors
    if parent is not None and parent.number >= version.number:
        raise CorruptObject(f"object {key}: its parent {parent} is no earlier version")
    if delta is not None and (parent is None or delta.tensors.keys() != tensors.keys()):
        raise CorruptObject(f"object {key}: its delta does not cover its tensors")
    if manifest.kind == "delta" and delta is None:
        raise CorruptObject(f"object {key} is a delta and holds none")
    if not set(manifest.weights.tied.values()) <= tensors.keys():
        raise CorruptObject(f"object {key}: a tied name names no tensor")
    for name, entry in tensors.items():
        if entry.bytes != nbytes_of(entry.dtype, entry.shape):
            raise CorruptObject(
                f"object {key}: tensor {name} is {entry.bytes} bytes, "
                f"not {entry.dtype}{list(entry.shape)}"
            )
        if manifest.kind == "anchor" and not entry.file:
            raise CorruptObject(f"object {key} is an anchor without tensor {name}")


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor; `CorruptObject` for a dtype that nobody here writes."""
    return math.prod(shape) * element_of(dtype).bits.itemsize
