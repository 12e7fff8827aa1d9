"""Fetches any tensors of a weight version, each verified before it is returned (invariant 6)."""

from collections.abc import Iterable

import torch

from rollstream.storage.stores.hashing import content_hash
from rollstream.storage.weights.manifest import Manifest, version_folder
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.streams.values import Version


def fetch_tensors(
    store: ObjectStore,
    version: Version,
    manifest_hash: str | None = None,
    tensors: Iterable[str] | None = None,
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The version's manifest and these of its tensors (all by default), read by ranges. For a delta
    they are made from the anchor and all changes since.

    Give the announced hash of the manifest to be sure of exactly the announced version. The caller
    owns the memory; tied names share it. Raises `ObjectMissing` if the version, its base or such a
    tensor does not (or no longer) exist, and `CorruptObject`, which names the tensor and the file;
    then nothing is returned.
    """
    held = ResidentWeights(tensors)
    manifest = held.move(store, version, manifest_hash).manifest
    return manifest, held.tensors


def fetch_model_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """One of the model's files (`config.json`, the tokenizer's), verified. They are stored with the
    anchor.
    """
    entry = next((entry for entry in manifest.model_files if entry.name == name), None)
    if entry is None:
        raise ObjectMissing(f"version {manifest.version} has no file {name}")
    key = f"{version_folder(manifest.anchor)}/{name}"
    data = store.get(key)
    if content_hash(data) != entry.hash:
        raise CorruptObject(f"object {key} differs from the hash in its manifest")
    return data
