"""A weight version's manifest, created last: a folder without one belongs to an unfinished
write.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from rollstream.errors import CorruptObject
from rollstream.storage.model_folder.hf_folder import TEMPLATES
from rollstream.storage.stores.base import ObjectStore, content_hash, is_key
from rollstream.storage.stores.json_objects import decode_json, encode_json
from rollstream.storage.stores.part import complete_key
from rollstream.storage.stores.run_keys import MANIFESTS, RunKeys
from rollstream.storage.weights.delta.coding import Coding, ValueCoding, element_of
from rollstream.streams.values import Version

# Longer numbers are not a version's, and Python refuses to convert thousands of digits.
_VERSION = re.compile(r"v([0-9]{8,18})-t([0-9]{4,18})")
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A size, place or count in a manifest; the bound keeps sums and products small, whatever another
program wrote.
"""
DENSE_RATIO_MAX = 1 << 15
"""Most bytes from one byte of a dense payload: a zstd block holds at most 128 KiB and takes at
least 4 bytes.
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
    """One object of a version's or checkpoint's folder."""

    name: str
    bytes: Size
    hash: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The bytes `[start, end)` of a file, "" if the folder has only changes (a delta); `hash`
    covers the complete tensor's dtype, shape and bytes.
    """

    file: str
    start: Size
    end: Size
    dtype: str
    shape: tuple[Size, ...]
    hash: str

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """A tensor with several names (tied) is stored once; `tied` maps each further name to the
    stored one.
    """

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]

    def owner(self, name: str) -> str:
        """Returns the stored name of a tensor, by any of its names."""
        return self.tied.get(name, name)

    def entry(self, name: str) -> TensorEntry:
        """Returns a tensor's entry by any of its names, or raises `KeyError`."""
        return self.tensors[self.owner(name)]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.tensors, *self.tied)

    @property
    def combined_hash(self) -> str:
        """Returns one hash of all tensors, whichever files hold them."""
        return combined_hash(self._hashes(), self.tied)

    def has_exactly(self, hashes: Mapping[str, str], tied: Mapping[str, str]) -> bool:
        """Whether these are the hashes of all its tensors, and these its tied names."""
        return tied == self.tied and hashes == self._hashes()

    def _hashes(self) -> dict[str, str]:
        return {name: entry.hash for name, entry in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """Made from the parent's tensor of the same name by the payload `[start, end)` of a file, with
    the hash `payload`. `base` is the hash of the parent's tensor, "" without one of this dtype and
    shape.
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
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Delta:
    """All tensors of a version as differences from the parent whose manifest has the hash
    `parent_hash`.
    """

    parent_hash: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, DeltaEntry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """`base_hash` is that of its base's manifest, `scaling` (alpha / rank) multiplies the product
    of its factors.
    """

    base_hash: str
    scaling: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete version, of `kind` `anchor` (all tensors), `delta` (changes since `parent`), or
    `adapter` (the factors).

    `anchor` is the full version from which it is made: itself, the begin of a delta's chain, or an
    adapter's base; its folder has the `model_files` (configuration and tokenizer). An anchor may
    hold its `delta` too, for readers of the parent.
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
    """Version of the layout. Unset if the stored object has none: encoding must give the announced
    hash.
    """
    adapter: AdapterEntry | msgspec.UnsetType = msgspec.UNSET
    """Unset in versions that hold whole weights."""

    @property
    def base(self) -> Version | None:
        return {"anchor": None, "delta": self.parent, "adapter": self.anchor}[self.kind]

    @property
    def hash(self) -> str:
        return content_hash(encode_json(self))

    @property
    def files(self) -> tuple[FileEntry, ...]:
        model_files = self.model_files if self.kind == "anchor" else ()
        return (*self.weights.files, *(self.delta.files if self.delta else ()), *model_files)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    @property
    def full_bytes(self) -> int:
        """Returns the complete tensors' size, wherever they are; tied ones count once."""
        return sum(entry.bytes for entry in self.weights.tensors.values())


def combined_hash(hashes: Mapping[str, str], tied: Mapping[str, str]) -> str:
    """Returns one hash over tensors' hashes and tied names, independent of their order, files and
    processes.
    """
    lines = [f"{name}={digest}" for name, digest in sorted(hashes.items())]
    lines += [f"{name}->{owner}" for name, owner in sorted(tied.items())]
    return content_hash("\n".join(lines).encode())


def version_folder(version: Version) -> str:
    return f"weights/{version}"


def parse_version(name: str) -> Version | None:
    """Returns the version of this folder name, None for other names."""
    match = _VERSION.fullmatch(name)
    return Version(int(match[1]), int(match[2])) if match else None


def manifest_key(version: Version) -> str:
    return f"{version_folder(version)}/manifest.json"


def read_manifest(
    store: ObjectStore, version: Version, manifest_hash: str | None = None
) -> Manifest:
    """Raises `ObjectMissing` if there is none, `CorruptObject` if it has another hash than the
    announced `manifest_hash` or contradicts itself.
    """
    data, key = store.get(manifest_key(version)), complete_key(store, manifest_key(version))
    if manifest_hash is not None and content_hash(data) != manifest_hash:
        raise CorruptObject(
            f"object {key} has hash {content_hash(data)}, announced {manifest_hash}"
        )
    manifest = decode_json(data, Manifest, key)
    _check(manifest, version, key)
    return manifest


def _check(manifest: Manifest, version: Version, key: str) -> None:
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
    # Wrong values of other fields are found when tensors are compared with their hashes.
    check_tensors(manifest.weights, key)
    for name, entry in tensors.items():
        if manifest.kind != "delta" and not entry.file:
            raise CorruptObject(f"object {key} is an {manifest.kind} without tensor {name}")
    _check_files(manifest, key)


def check_tensors(stored: TensorFiles, key: str) -> None:
    """Raise `CorruptObject` if a tensor's bytes do not fit its shape or its file, or a tied name
    names no tensor.
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
    for file in (*manifest.files, *manifest.model_files):
        plain = file.name.removeprefix(f"{TEMPLATES}/")
        # Names become files of an export.
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
        # A reader takes memory for a tensor before it reads any of it.
        if step.coding == "dense" and entry.bytes > DENSE_RATIO_MAX * step.bytes:
            raise CorruptObject(f"object {key}: {name} is larger than its changes can unfold to")


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns a tensor's size; raises `CorruptObject` for an unknown dtype."""
    return math.prod(shape) * element_of(dtype).bits.itemsize
