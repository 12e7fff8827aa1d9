"""A version as differences from its parent: `encode_version` makes them, `write_delta` writes their
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import create_idempotent
from rollstream.storage.weights.delta.codec import encode_tensor, encode_whole
from rollstream.storage.weights.delta.coding import CodedTensor
from rollstream.storage.weights.manifest import (
    Delta,
    DeltaEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorFiles,
)
from rollstream.storage.weights.shards import (
    ShardPart,
    join_shard,
    plan_shards,
    shard_name,
)
from rollstream.storage.weights.tensors import (
    DTYPE_NAMES,
    tensor_bytes,
    tensor_hash,
    untie,
)

DELTA_STEM = "delta"


@dataclass(frozen=True, slots=True)
class ParentVersion:
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class EncodedDifferences:
    """`weights` has the manifest's entries, `coded` the payloads, at most about one full version,
    and `bases` the hashes of the parent's tensors, "" without one.
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
    """Encodes each tensor as a difference, or completely if the parent's is missing or has another
    dtype or shape.
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
    """Create `folder/stem-0000i-of-0000n.safetensors`. Each is a valid safetensors file of
    payloads, as U8. Equal existing files stay.
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
