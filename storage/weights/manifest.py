"""Defines the manifest of a weight version (`Manifest`), the object that completes the version's
folder, and reads it (`read_manifest`). Checkpoints list their files by the same `TensorFiles`.

A manifest is created last, so a folder without one belongs to an unfinished write. For each tensor
it has a file, a range of bytes and a hash, so a reader fetches any tensor by one range and verifies
it without opening a file first. The range holds the tensor itself (`TensorEntry`), or in a delta
its changes since the parent version (`DeltaEntry`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import decode_json, encode_json
from rollstream.storage.weights.delta.coding import Coding, ValueCoding, element_of
from rollstream.streams.values import Version

_VERSION = re.compile(r"v(\d{8,})-t(\d{4,})")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Describes one object of a version's or checkpoint's folder: its name there, its size and the
    hash of its content.
    """

    name: str
    bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """States that a tensor is at the bytes `[start, end)` of a file; `hash` covers dtype, shape and
    bytes of the tensor. `file` is "" if the folder holds only the tensor's changes (a delta); the
    other fields describe the complete tensor all the same.
    """

    file: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    hash: str

    @property
    def bytes(self) -> int:
        """Return the tensor's size."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Lists the files of one folder and the tensors in them by name. Some models use one tensor
    under several names (tied tensors); it is stored once, and `tied` maps each further name to the
    name under which it is stored.
    """

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]

    def owner(self, name: str) -> str:
        """Return the name under which a tensor is stored, for any of its names."""
        return self.tied.get(name, name)

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's entry, by any of its names; raises `KeyError` if it is unknown."""
        return self.tensors[self.owner(name)]

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of all tensors."""
        return (*self.tensors, *self.tied)

    @property
    def combined_hash(self) -> str:
        """Return one hash of all tensors (the function `combined_hash`), whichever files hold
        them.
        """
        return combined_hash({name: entry.hash for name, entry in self.tensors.items()}, self.tied)


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """States how a tensor is made from the parent version's tensor of the same name: by the encoded
    changes (the payload) at the bytes `[start, end)` of a file.

    `base` is the hash of the parent's tensor, "" if the parent has none of this name, dtype and
    shape. `payload` is the hash of the payload, `coding` and `values` are its encoding
    (`delta/coding.py`), `changed` is the number of changed elements. An unchanged tensor has the
    coding `same`, no payload and no file.
    """

    base: str
    coding: Coding
    values: ValueCoding
    changed: int
    file: str
    start: int
    end: int
    payload: str

    @property
    def bytes(self) -> int:
        """Return the payload's size."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Delta:
    """Describes all tensors of a version as differences from its parent, the version whose manifest
    has the hash `parent_hash`. A tied tensor appears once, under the name by which the version
    stores it.
    """

    parent_hash: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, DeltaEntry]

    @property
    def bytes(self) -> int:
        """Return the size of the files."""
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """Describes a version that is a LoRA adapter: `base_hash` is the hash of the manifest of the
    version that the adapter applies to (its base); `scaling` is alpha / rank, by which the product
    of the adapter's two factors is multiplied.
    """

    base_hash: str
    scaling: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete weight version. Its `kind` states what its files hold: all tensors (an
    `anchor`), changes since `parent` (a `delta`), or the factors of an `adapter`.

    `parent` is the version before it, None if there is none. `anchor` is the full version from
    which it can be made: an anchor names itself, a delta the anchor at which its chain of parents
    begins, an adapter its base. An anchor may hold its `delta` too, for readers that have the
    parent. `model_files` (configuration and tokenizer) are in the anchor's folder.
    """

    run: str
    version: Version
    parent: Version | None
    anchor: Version
    kind: Literal["anchor", "delta", "adapter"]
    created_s: float
    weights: TensorFiles
    model_files: tuple[FileEntry, ...]
    delta: Delta | None = None
    format: int | msgspec.UnsetType = msgspec.UNSET
    """Version of the manifest's layout. Unset if the stored object has none, so that encoding it
    again gives the announced hash.
    """
    adapter: AdapterEntry | msgspec.UnsetType = msgspec.UNSET
    """Unset in versions that hold whole weights."""

    @property
    def base(self) -> Version | None:
        """Return the version without which this one cannot be used; None for an anchor."""
        return {"anchor": None, "delta": self.parent, "adapter": self.anchor}[self.kind]

    @property
    def hash(self) -> str:
        """Return the hash of the manifest object, which identifies everything in the version."""
        return content_hash(encode_json(self))

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Return every object of the version's own folder except the manifest."""
        own = self.model_files if self.kind == "anchor" else ()
        return (*self.weights.files, *(self.delta.files if self.delta else ()), *own)

    @property
    def bytes(self) -> int:
        """Return the size of the objects in `files`."""
        return sum(entry.bytes for entry in self.files)

    @property
    def full_bytes(self) -> int:
        """Return the size of the complete tensors, wherever they are; tied ones count once."""
        return sum(entry.bytes for entry in self.weights.tensors.values())


def combined_hash(hashes: Mapping[str, str], tied: Mapping[str, str]) -> str:
    """Return one hash over the tensors' hashes and the tied names, in the order of names. It does
    not depend on the order or the number of files, or on which process holds which tensor.
    """
    lines = [f"{name}={digest}" for name, digest in sorted(hashes.items())]
    lines += [f"{name}->{owner}" for name, owner in sorted(tied.items())]
    return content_hash("\n".join(lines).encode())


def version_folder(version: Version) -> str:
    """Return the prefix of the keys of a version's objects, without the last slash."""
    return f"weights/{version}"


def parse_version(name: str) -> Version | None:
    """Return the version whose folder has this name, None for any other name."""
    match = _VERSION.fullmatch(name)
    return Version(int(match[1]), int(match[2])) if match else None


def manifest_key(version: Version) -> str:
    return f"{version_folder(version)}/manifest.json"


def read_manifest(
    store: ObjectStore, version: Version, manifest_hash: str | None = None
) -> Manifest:
    """Read and check the manifest of a version; `manifest_hash` is the announced hash, None if it
    is not known.

    Raises `ObjectMissing` if the version has no manifest, `CorruptObject` if its hash is not the
    announced one or it contradicts itself.
    """
    key = manifest_key(version)
    data = store.get(key)
    if manifest_hash is not None and content_hash(data) != manifest_hash:
        raise CorruptObject(
            f"object {key} has hash {content_hash(data)}, announced {manifest_hash}"
        )
    manifest = decode_json(data, Manifest, key)
    _check(manifest, version, key)
    return manifest


def _check(manifest: Manifest, version: Version, key: str) -> None:
    """Raise `CorruptObject` if fields on which every reader relies contradict each other. Wrong
    values of other fields are found when the tensors are compared with their hashes.
    """
    if manifest.version != version:
        raise CorruptObject(f"object {key} is the manifest of another version, {manifest.version}")
    parent, delta, tensors = manifest.parent, manifest.delta, manifest.weights.tensors
    if parent is not None and parent.number >= version.number:
        raise CorruptObject(f"object {key}: its parent {parent} is not an earlier version")
    if delta is not None and (parent is None or delta.tensors.keys() != tensors.keys()):
        raise CorruptObject(f"object {key}: its delta does not cover its tensors")
    if manifest.kind == "delta" and delta is None:
        raise CorruptObject(f"object {key} is a delta and holds none")
    if (manifest.kind == "adapter") != bool(manifest.adapter):
        raise CorruptObject(f"object {key} is an adapter without a base, or no adapter with one")
    if not set(manifest.weights.tied.values()) <= tensors.keys():
        raise CorruptObject(f"object {key}: a tied name names no tensor")
    for name, entry in tensors.items():
        if entry.bytes != nbytes_of(entry.dtype, entry.shape):
            raise CorruptObject(
                f"object {key}: tensor {name} is {entry.bytes} bytes, "
                f"not {entry.dtype}{list(entry.shape)}"
            )
        if manifest.kind != "delta" and not entry.file:
            raise CorruptObject(f"object {key} is an {manifest.kind} without tensor {name}")


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; raises `CorruptObject` for an unknown dtype."""
    return math.prod(shape) * element_of(dtype).bits.itemsize
