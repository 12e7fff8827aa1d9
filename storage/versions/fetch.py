"""Fetching any tensors of a weight version, each verified before it is returned (invariant 6)."""

from collections.abc import Iterable

import torch

from storage.hashing import content_hash
from storage.manifest import Manifest, version_folder
from storage.objects import ObjectStore
from storage.versions.held import HeldWeights
from streams.errors import CorruptObject, ObjectMissing
from streams.records import Version


def fetch(
    store: ObjectStore,
    version: Version,
    manifest_hash: str | None = None,
    tensors: Iterable[str] | None = None,
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The version's manifest and these of its tensors (all without a choice), read by ranges; of a
    delta the anchor's and all changes since.

    Give the announced hash of the manifest to be sure of the very version that was announced. The
    memory is the caller's own, tied names share it. `ObjectMissing` if the version or what it
    builds on is not there (any more) or has no such tensor, `CorruptObject` with the name of the
    tensor and file that failed; nothing is returned then.
    """
    held = HeldWeights(tensors)
    manifest = held.move(store, version, manifest_hash).manifest
    return manifest, held.tensors


def fetch_file(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    """One of the model's files (`config.json`, the tokenizer's), verified. An anchor has them."""
    entry = next((entry for entry in manifest.model_files if entry.name == name), None)
    if entry is None:
        raise ObjectMissing(f"version {manifest.version} has no file {name}")
    key = f"{version_folder(manifest.anchor)}/{name}"
    data = store.get(key)
    if content_hash(data) != entry.hash:
        raise CorruptObject(f"object {key} differs from the hash in its manifest")
    return data
