"""Publishing a weight version as an ordinary Hugging Face checkpoint folder (invariant 6).

Objects under the version's folder are only ever created, the manifest last; a writer that was
killed half-way calls `publish` again and finds its own objects there. Nobody reads the version
before `believe` (`pointer.py`).
"""

import json
from collections.abc import Mapping

import torch

from storage.documents import create_same, decode, encode
from storage.manifest import (
    FileEntry,
    Manifest,
    TensorFiles,
    manifest_key,
    version_folder,
)
from storage.objects import ObjectStore
from storage.shards import write_shards
from streams.errors import ObjectExists, StoreError
from streams.records import Version

INDEX = "model.safetensors.index.json"


def publish(
    store: ObjectStore,
    run: str,
    version: Version,
    tensors: Mapping[str, torch.Tensor],
    model_files: Mapping[str, bytes],
    shard_bytes: int,
    parent: Version | None,
    created_s: float,
) -> Manifest:
    """Write the whole version as an anchor, return its manifest; calling it again changes nothing.

    `tensors` are published as they are (cast them before); those that share memory are stored once.
    (1) the shards, (2) the index and the model's files, (3) the manifest. `StoreError` when the
    version exists with other content.
    """
    folder = version_folder(version)
    weights = write_shards(store, folder, "model", tensors, shard_bytes)  # 1
    small = {**model_files, INDEX: _index(weights)}
    files = tuple(  # 2
        FileEntry(name, len(data), create_same(store, f"{folder}/{name}", data))
        for name, data in sorted(small.items())
    )
    return _complete(  # 3
        store, Manifest(run, version, parent, version, "anchor", created_s, weights, files)
    )


def _index(weights: TensorFiles) -> bytes:
    """The list of shards in the form that transformers and vLLM read."""
    total = sum(entry.end - entry.start for entry in weights.tensors.values())
    names = {name: entry.file for name, entry in sorted(weights.tensors.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1).encode()


def _complete(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Create the manifest, or return the one that an earlier call for the same content left."""
    key = manifest_key(manifest.version)
    try:
        store.create(key, encode(manifest))
    except ObjectExists:
        present = decode(store.get(key), Manifest, key)
        if _content(present) != _content(manifest):
            raise StoreError(
                f"object {key} completes other content: two writers used its term"
            ) from None
        return present
    return manifest


def _content(manifest: Manifest) -> tuple[object, ...]:
    """All but the time."""
    return (
        manifest.run,
        manifest.version,
        manifest.parent,
        manifest.anchor,
        manifest.kind,
        manifest.weights,
        manifest.model_files,
    )
