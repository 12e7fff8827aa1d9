"""Publishes a version (invariant 6): an anchor, which is an ordinary Hugging Face checkpoint
folder, or a delta, the differences from its parent.

Objects are only ever created, the manifest last, and equal inputs give equal bytes. So a writer
that was killed half-way repeats the call. Readers use the version once `advance_pointer` has moved
the pointer.

Reading list: after `consumers/trainer/publisher.py`, before `storage/weights/pointer.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollstream.errors import ObjectExists, StoreError
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import (
    FORMAT,
    create_idempotent,
    decode_json,
    encode_json,
)
from rollstream.storage.weights.anchors import is_kept_beside
from rollstream.storage.weights.differences import (
    EncodedDifferences,
    ParentVersion,
    encode_version,
    write_delta,
)
from rollstream.storage.weights.manifest import (
    Delta,
    FileEntry,
    Manifest,
    TensorFiles,
    manifest_key,
    version_folder,
)
from rollstream.storage.weights.shards import (
    write_shards,
)
from rollstream.storage.weights.tensors import (
    DistributedDifferences,
    DistributedTensors,
    Tensors,
    local_tensors,
)
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.values import Version

SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class NewVersion:
    """`tensors` have the published dtype, in shards of at most `shard_bytes`. An anchor also
    carries the `model_files` (configuration, tokenizer).
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
    """Writes the complete version and returns its manifest; idempotent. It is an anchor if one is
    due or the parent's tensors are not given; an anchor also holds a small delta.

    Steps: (1) the shards, (2) for an anchor the index and the model's files, (3) the manifest.
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
    """Creates the manifest, or returns an equal stored one. Raises `StoreError` if that has other
    content.
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
