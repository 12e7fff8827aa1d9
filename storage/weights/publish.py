"""Publishes a weight version (`publish_version`, invariant 6): an anchor, which is an ordinary
Hugging Face checkpoint folder, or a delta, the differences from its parent. `adapters.py` publishes
LoRA adapters.

Objects are only ever created, the manifest last, and equal inputs give equal bytes. So a writer
that was killed half-way repeats the call. Readers use the version once `advance_pointer` has moved
the pointer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rollstream.errors import ObjectExists, StoreError
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import (
    FORMAT,
    create_idempotent,
    decode_json,
    encode_json,
)
from rollstream.storage.weights.anchors import is_kept_beside
from rollstream.storage.weights.delta.codec import encode_tensor, encode_whole
from rollstream.storage.weights.delta.coding import CodedTensor
from rollstream.storage.weights.manifest import (
    Delta,
    DeltaEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorFiles,
    manifest_key,
    version_folder,
)
from rollstream.storage.weights.shards import (
    ShardPart,
    join_shard,
    plan_shards,
    shard_name,
    write_shards,
)
from rollstream.storage.weights.tensors import (
    DTYPE_NAMES,
    DistributedDifferences,
    DistributedTensors,
    Tensors,
    local_tensors,
    tensor_bytes,
    tensor_hash,
    untie,
)
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.values import Version

DELTA_STEM = "delta"


@dataclass(frozen=True, slots=True)
class ParentVersion:
    """Holds a published version's manifest and tensors, a tied tensor under each of its names."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class EncodedDifferences:
    """Holds a version as differences from its parent: `weights` has the manifest's entries, `coded`
    the payloads, in memory at most about one full version, and `bases` the hashes of the parent's
    tensors, "" without one.
    """

    weights: TensorFiles
    coded: Mapping[str, CodedTensor]
    bases: Mapping[str, str]

    @property
    def bytes(self) -> int:
        return sum(len(coded.payload) for coded in self.coded.values())


def encode_version(
    tensors: Mapping[str, torch.Tensor], parent: ParentVersion
) -> EncodedDifferences:
    """Encode every tensor as its difference from the parent's of the same name, or completely if
    that is missing or has another dtype or shape.
    """
    untied, tied = untie(tensors)
    entries: dict[str, TensorEntry] = {}
    coded: dict[str, CodedTensor] = {}
    bases: dict[str, str] = {}
    for name, tensor in untied.items():
        base = _base(name, tensor, parent)
        dtype, shape, data = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor)
        if base is None:
            coded[name] = encode_whole(data, dtype)
        else:
            coded[name] = encode_tensor(tensor_bytes(parent.tensors[name]), data, dtype)
        same = base is not None and coded[name].coding == "same"
        digest = base.hash if base and same else tensor_hash(dtype, shape, data)
        bases[name] = base.hash if base else ""
        entries[name] = TensorEntry("", 0, data.nbytes, dtype, shape, digest)
    return EncodedDifferences(TensorFiles((), entries, tied), coded, bases)


def _base(name: str, tensor: torch.Tensor, parent: ParentVersion) -> TensorEntry | None:
    if name not in parent.tensors or name not in parent.manifest.weights.names:
        return None
    entry = parent.manifest.weights.entry(name)
    alike = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) == (entry.dtype, entry.shape)
    return entry if alike else None


def write_delta(
    store: ObjectStore,
    folder: str,
    differences: EncodedDifferences,
    parent: Manifest,
    shard_bytes: int,
    stem: str = DELTA_STEM,
) -> Delta:
    """Create the delta's files, `folder/stem-0000i-of-0000n.safetensors`, and return their
    description. Each is a valid safetensors file of payloads, as U8; an unchanged tensor has none.
    Equal existing files stay.
    """
    payloads = {name: coded.payload for name, coded in differences.coded.items() if coded.payload}
    sizes = {name: len(payload) for name, payload in payloads.items()}
    shards = plan_shards(sizes, shard_bytes)
    files: list[FileEntry] = []
    entries: dict[str, DeltaEntry] = {}
    for number, names in enumerate(shards, start=1):
        file = shard_name(stem, number, len(shards))
        parts = [ShardPart(name, "U8", (sizes[name],), payloads[name]) for name in names]
        data, places = join_shard(parts)
        files.append(FileEntry(file, len(data), create_idempotent(store, f"{folder}/{file}", data)))
        for name in names:
            entries[name] = _entry(differences, name, file, *places[name])
    for name in differences.coded.keys() - payloads.keys():
        entries[name] = _entry(differences, name, "", 0, 0)
    return Delta(parent.hash, tuple(files), entries)


def _entry(
    differences: EncodedDifferences, name: str, file: str, start: int, end: int
) -> DeltaEntry:
    coded = differences.coded[name]
    digest = content_hash(coded.payload) if coded.payload else ""
    return DeltaEntry(
        differences.bases[name],
        coded.coding,
        coded.values,
        coded.changed,
        file,
        start,
        end,
        digest,
    )


SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Holds the content of a version to publish. `tensors` have the dtype in which they are
    published, in shards of at most `shard_bytes`. An anchor also carries the `model_files`
    (configuration, tokenizer).
    """

    run: str
    version: Version
    tensors: Tensors
    model_files: Mapping[str, bytes]
    shard_bytes: int
    created_s: float
    completes: bool = True
    """False in a process that only writes its part of distributed tensors."""

    @property
    def folder(self) -> str:
        return version_folder(self.version)


def publish_version(
    store: ObjectStore,
    new: NewVersion,
    parent: Manifest | None = None,
    parent_tensors: Tensors | None = None,
    anchor_due: bool = True,
) -> Manifest:
    """Write the complete version and return its manifest; idempotent. It is an anchor if one is due
    or the parent's tensors are not given; an anchor also holds a small delta. A delta keeps its
    anchor's model files and ignores those of `new`.

    Steps: (1) the shards, (2) for an anchor the index and the model's files, (3) the manifest. A
    process that does not complete the version (`NewVersion.completes`) writes its part of (1).
    Raises `StoreError` if the version exists with other content.
    """
    differences = None
    if parent is not None and parent_tensors is not None:
        differences = _encode(new.tensors, parent, parent_tensors)
    if parent is not None and differences is not None and not anchor_due:
        return _complete(store, new, _delta(store, new, differences, parent))  # 3
    hashes: dict[str, str] = {}
    if isinstance(differences, EncodedDifferences):
        hashes = {name: entry.hash for name, entry in differences.weights.tensors.items()}
    manifest = _anchor(store, new, parent, hashes)
    beside = differences and is_kept_beside(differences.bytes, manifest.full_bytes)
    if parent is not None and differences is not None and beside:
        manifest = replace(manifest, delta=_write(store, new, differences, parent))  # 1
    return _complete(store, new, manifest)  # 3


def _complete(store: ObjectStore, new: NewVersion, manifest: Manifest) -> Manifest:
    return complete_version(store, manifest) if new.completes else manifest


def _encode(
    tensors: Tensors, parent: Manifest, parent_tensors: Tensors
) -> EncodedDifferences | DistributedDifferences:
    if isinstance(tensors, DistributedTensors):
        assert isinstance(parent_tensors, DistributedTensors), "the base is in one process"
        return tensors.differences(parent, parent_tensors)
    return encode_version(tensors, ParentVersion(parent, local_tensors(parent_tensors)))


def _write(
    store: ObjectStore,
    new: NewVersion,
    differences: EncodedDifferences | DistributedDifferences,
    parent: Manifest,
) -> Delta:
    if isinstance(differences, DistributedDifferences):
        return differences.write(store, new.folder, parent, new.shard_bytes)
    return write_delta(store, new.folder, differences, parent, new.shard_bytes)


def _delta(
    store: ObjectStore,
    new: NewVersion,
    differences: EncodedDifferences | DistributedDifferences,
    parent: Manifest,
) -> Manifest:
    delta = _write(store, new, differences, parent)  # 1
    return Manifest(
        new.run,
        new.version,
        parent.version,
        parent.anchor,
        "delta",
        new.created_s,
        differences.weights,
        tuple(file for file in parent.model_files if file.name != SHARD_INDEX),
        delta,
    )


def _anchor(
    store: ObjectStore, new: NewVersion, parent: Manifest | None, hashes: Mapping[str, str]
) -> Manifest:
    weights = write_shards(store, new.folder, "model", new.tensors, new.shard_bytes, hashes)  # 1
    small = {**new.model_files, SHARD_INDEX: shard_index(weights)}
    files = tuple(  # 2
        FileEntry(name, len(data), _create(store, new, name, data))
        for name, data in sorted(small.items())
    )
    before = None if parent is None else parent.version
    version = new.version
    return Manifest(new.run, version, before, version, "anchor", new.created_s, weights, files)


def _create(store: ObjectStore, new: NewVersion, name: str, data: bytes) -> str:
    if not new.completes:
        return content_hash(data)
    return create_idempotent(store, f"{new.folder}/{name}", data)


def shard_index(weights: TensorFiles) -> bytes:
    # The form that transformers and vLLM read.
    total = sum(entry.end - entry.start for entry in weights.tensors.values())
    names = {name: entry.file for name, entry in sorted(weights.tensors.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1).encode()


def complete_version(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Create and return the manifest of written files, or return an equal stored one. Raises
    `StoreError` if that has other content.
    """
    key, manifest = manifest_key(manifest.version), replace(manifest, format=FORMAT)
    try:
        store.create(key, encode_json(manifest))
    except ObjectExists:
        present = decode_json(store.get(key), Manifest, key)
        # A repeated call has another time.
        if replace(present, created_s=0.0) != replace(manifest, created_s=0.0):
            raise StoreError(
                f"object {key} completes other content: two writers used its term"
            ) from None
        return present
    return manifest


def announcement(manifest: Manifest, time_s: float) -> WeightsAnnounced:
    return WeightsAnnounced(
        run=manifest.run,
        version=manifest.version,
        manifest=manifest_key(manifest.version),
        manifest_hash=manifest.hash,
        kind=manifest.kind,
        parent=manifest.parent,
        bytes=manifest.bytes,
        time_s=time_s,
    )
