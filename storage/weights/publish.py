"""Publishes a weight version (invariant 6): an anchor, which is an ordinary Hugging Face checkpoint
folder, or a delta, which holds the differences of its tensors from the parent's.

Objects under the version's folder are only ever created, the manifest last. A writer that was
killed half-way calls `publish_version` again and finds its own objects there. No reader uses the version
before `believe` (`pointer.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollstream.storage.stores.json_objects import FORMAT, create_idempotent, decode_json, encode_json
from rollstream.storage.weights.manifest import Delta, FileEntry, Manifest, TensorFiles, manifest_key, version_folder
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.shards import write_shards
from rollstream.storage.weights.distributed import DistributedTensors, DistributedDifferences, Tensors, local_tensors
from rollstream.storage.weights.anchoring import is_kept_beside
from rollstream.storage.weights.differences import EncodedDifferences, ParentVersion, encode_version, write_delta
from rollstream.errors import ObjectExists, StoreError
from rollstream.streams.values import Version

SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class NewVersion:
    """The content of a version to publish: `tensors` are published as they are (cast them before),
    in files of at most `shard_bytes`; an anchor also carries `model_files`.
    """

    run: str
    version: Version
    tensors: Tensors
    model_files: Mapping[str, bytes]
    shard_bytes: int
    created_s: float

    @property
    def folder(self) -> str:
        """Key prefix of the version's objects."""
        return version_folder(self.version)


def publish_version(
    store: ObjectStore,
    new: NewVersion,
    parent: Manifest | None = None,
    parent_tensors: Tensors | None = None,
    anchor_due: bool = True,
) -> Manifest:
    """Write the complete version and return its manifest; idempotent.

    It is an anchor if one is due or the parent's tensors are not given; an anchor also holds its
    delta if that is small. Tensors that share memory are stored once, and distributed tensors are
    stored by each of their processes. A delta keeps the anchor's model files, whatever is given
    here.

    (1) the shards, (2) for an anchor the index and the model's files, (3) the manifest. Raises
    `StoreError` if the version exists with other content.
    """
    differences = None
    if parent is not None and parent_tensors is not None:
        differences = _encode(new.tensors, parent, parent_tensors)
    if parent is not None and differences is not None and not anchor_due:
        return _complete(store, _delta(store, new, differences, parent))  # 3
    manifest = _anchor(store, new, parent)
    beside = differences and is_kept_beside(differences.bytes, manifest.full_bytes)
    if parent is not None and differences is not None and beside:
        manifest = replace(manifest, delta=_write(store, new, differences, parent))  # 1
    return _complete(store, manifest)  # 3


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


def _anchor(store: ObjectStore, new: NewVersion, parent: Manifest | None) -> Manifest:
    weights = write_shards(store, new.folder, "model", new.tensors, new.shard_bytes)  # 1
    small = {**new.model_files, SHARD_INDEX: shard_index(weights)}
    files = tuple(  # 2
        FileEntry(name, len(data), create_idempotent(store, f"{new.folder}/{name}", data))
        for name, data in sorted(small.items())
    )
    before = None if parent is None else parent.version
    version = new.version
    return Manifest(new.run, version, before, version, "anchor", new.created_s, weights, files)


def shard_index(weights: TensorFiles) -> bytes:
    """The index of shards in the form that transformers and vLLM read."""
    total = sum(entry.end - entry.start for entry in weights.tensors.values())
    names = {name: entry.file for name, entry in sorted(weights.tensors.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1).encode()


def _complete(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Create the manifest, or return the one that an earlier call with the same content left."""
    key, manifest = manifest_key(manifest.version), replace(manifest, format=FORMAT)
    try:
        store.create(key, encode_json(manifest))
    except ObjectExists:
        present = decode_json(store.get(key), Manifest, key)
        if replace(present, created_s=0.0) != replace(manifest, created_s=0.0):
            raise StoreError(
                f"object {key} completes other content: two writers used its term"
            ) from None
        return present
    return manifest
