"""Fetching any tensors of a weight version, each verified before it is returned (invariant 6)."""

from collections.abc import Iterable

import torch

from storage.hashing import content_hash
from storage.manifest import Manifest, read_manifest, version_folder
from storage.objects import ObjectStore
from storage.shards import read_shards
from streams.errors import CorruptObject, ObjectMissing, StoreError
from streams.records import Version


def fetch(
    store: ObjectStore,
    version: Version,
    manifest_hash: str | None = None,
    tensors: Iterable[str] | None = None,
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The version's manifest and these of its tensors (all without a choice), read by ranges.

    Give the announced hash of the manifest to be sure of the very version that was announced.
    `ObjectMissing` if the version is not there (any more) or has no such tensor, `CorruptObject`
    with the name of the tensor and file that failed; nothing is returned then.
    """
    manifest = read_manifest(store, version, manifest_hash)
    if manifest.kind != "anchor":
        raise StoreError(f"version {version} is a {manifest.kind}; this release reads anchors only")
    names = manifest.weights.names if tensors is None else tuple(tensors)
    unknown = set(names).difference(manifest.weights.names)
    if unknown:
        raise ObjectMissing(f"version {version} has no tensor {', '.join(sorted(unknown))}")
    return manifest, read_shards(store, version_folder(version), manifest.weights, names)


def fetch_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """One of the model's files (`config.json`, the tokenizer's), verified."""
    entry = next((entry for entry in manifest.model_files if entry.name == name), None)
    if entry is None:
        raise ObjectMissing(f"version {manifest.version} has no file {name}")
    key = f"{version_folder(manifest.version)}/{name}"
    data = store.get(key)
    if content_hash(data) != entry.hash:
        raise CorruptObject(f"object {key} differs from the hash in its manifest")
    return data
