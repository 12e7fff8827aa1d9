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
from typing import Annotated, Literal

import msgspec

from rollstream.errors import CorruptObject
from rollstream.storage.hf_folder import TEMPLATES
from rollstream.storage.stores.base import ObjectStore, content_hash, is_key
from rollstream.storage.stores.json_objects import decode_json, encode_json
from rollstream.storage.stores.run_keys import MANIFESTS, RunKeys
from rollstream.storage.weights.delta.coding import Coding, ValueCoding, element_of
from rollstream.streams.values import Version

# Longer numbers are not a version's, and Python refuses to convert thousands of digits.
_VERSION = re.compile(r"v([0-9]{8,18})-t([0-9]{4,18})")
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A size, place or count that a manifest states. The bound keeps sums and products of a few of them
small, whatever a manifest of another program has.
"""
DENSE_RATIO_MAX = 1 << 15
"""Most bytes that one byte of a dense payload unfolds to: a block of zstd holds at most 128 KiB and
takes at least 4 bytes.
"""
VERSION_FILES = RunKeys(
    re.compile(
        rf"weights/{_VERSION.pattern}/"
        rf"(?P<file>(?!manifest\.json$)(?:{TEMPLATES}/)?[^/]+)"
    ),
    "later", "final", linked=True,
)  # fmt: skip
RUN_KEYS = (
    RunKeys(
        re.compile(rf"weights/{_VERSION.pattern}/manifest\.json"),
        "later", "final", MANIFESTS, linked=True,
    ),
    VERSION_FILES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Describes one object of a version's or checkpoint's folder: its name there, its size and the
    hash of its content.
    """

    name: str
    bytes: Size
    hash: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """States that a tensor is at the bytes `[start, end)` of a file; `hash` covers dtype, shape and
    bytes of the tensor. `file` is "" if the folder holds only the tensor's changes (a delta); the
    other fields describe the complete tensor all the same.
    """

    file: str
    start: Size
    end: Size
    dtype: str
    shape: tuple[Size, ...]
    hash: str

    @property
    def bytes(self) -> int:
        """Returns the tensor's size."""
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
        """Returns the name under which a tensor is stored, for any of its names."""
        return self.tied.get(name, name)

    def entry(self, name: str) -> TensorEntry:
        """Returns a tensor's entry, by any of its names; raises `KeyError` if it is unknown."""
        return self.tensors[self.owner(name)]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of all tensors."""
        return (*self.tensors, *self.tied)

    @property
    def combined_hash(self) -> str:
        """Returns one hash of all tensors (the function `combined_hash`), whichever files hold
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
    changed: Size
    file: str
    start: Size
    end: Size
    payload: str

    @property
    def bytes(self) -> int:
        """Returns the payload's size."""
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
        """Returns the size of the files."""
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
        """Returns the version without which this one cannot be used; None for an anchor."""
        return {"anchor": None, "delta": self.parent, "adapter": self.anchor}[self.kind]

    @property
    def hash(self) -> str:
        """Returns the hash of the manifest object, which identifies everything in the version."""
        return content_hash(encode_json(self))

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Returns every object of the version's own folder except the manifest."""
        own = self.model_files if self.kind == "anchor" else ()
        return (*self.weights.files, *(self.delta.files if self.delta else ()), *own)

    @property
    def bytes(self) -> int:
        """Returns the size of the objects in `files`."""
        return sum(entry.bytes for entry in self.files)

    @property
    def full_bytes(self) -> int:
        """Returns the size of the complete tensors, wherever they are; tied ones count once."""
        return sum(entry.bytes for entry in self.weights.tensors.values())


def combined_hash(hashes: Mapping[str, str], tied: Mapping[str, str]) -> str:
    """Returns one hash over the tensors' hashes and the tied names, in the order of names. It does
    not depend on the order or the number of files, or on which process holds which tensor.
    """
    lines = [f"{name}={digest}" for name, digest in sorted(hashes.items())]
    lines += [f"{name}->{owner}" for name, owner in sorted(tied.items())]
    return content_hash("\n".join(lines).encode())


def version_folder(version: Version) -> str:
    """Returns the prefix of the keys of a version's objects, without the last slash."""
    return f"weights/{version}"


def parse_version(name: str) -> Version | None:
    """Returns the version whose folder has this name, None for any other name."""
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
    check_tensors(manifest.weights, key)
    for name, entry in tensors.items():
        if manifest.kind != "delta" and not entry.file:
            raise CorruptObject(f"object {key} is an {manifest.kind} without tensor {name}")
    _check_files(manifest, key)


def check_tensors(stored: TensorFiles, key: str) -> None:
    """Raise `CorruptObject` if a tensor's bytes are not those of its shape, or not within its file,
    or a tied name names no tensor. `key` is that of the manifest.
    """
    if not set(stored.tied.values()) <= stored.tensors.keys():
        raise CorruptObject(f"object {key}: a tied name names no tensor")
    sizes = {file.name: file.bytes for file in stored.files}
    for name, entry in stored.tensors.items():
        if entry.bytes != nbytes_of(entry.dtype, entry.shape):
            raise CorruptObject(
                f"object {key}: tensor {name} is {entry.bytes} bytes, "
                f"not {entry.dtype}{list(entry.shape)}"
            )
        if entry.file and entry.end > sizes.get(entry.file, -1):
            raise CorruptObject(f"object {key}: tensor {name} is outside of its file")


def _check_files(manifest: Manifest, key: str) -> None:
    """Raise `CorruptObject` if a file has no plain name (names become files of an export), or if a
    payload is not within its file, or unfolds to more than its bytes can hold: a reader takes
    memory for a tensor before it reads any of it.
    """
    for file in (*manifest.files, *manifest.model_files):
        plain = file.name.removeprefix(f"{TEMPLATES}/")
        if "/" in plain or not is_key(file.name):
            raise CorruptObject(f"object {key} names the file {file.name[:80]!r}")
    delta = manifest.delta
    payload_sizes = {file.name: file.bytes for file in delta.files} if delta else {}
    for name, entry in manifest.weights.tensors.items():
        step = delta.tensors[name] if delta else None
        if step is None or step.coding == "same":
            continue
        if not step.start <= step.end <= payload_sizes.get(step.file, -1):
            raise CorruptObject(f"object {key}: the changes of {name} are outside of their file")
        if step.coding == "dense" and entry.bytes > DENSE_RATIO_MAX * step.bytes:
            raise CorruptObject(f"object {key}: {name} is larger than its changes can unfold to")


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes; raises `CorruptObject` for an unknown dtype."""
    return math.prod(shape) * element_of(dtype).bits.itemsize
