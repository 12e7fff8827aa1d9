"""Verifies a stored version against its manifest: every hash is computed again."""

from collections.abc import Iterator

from rollstream.storage.stores.hashing import content_hash
from rollstream.storage.weights.manifest import FileEntry, Manifest, read_manifest, version_folder
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.tensors import tensor_hash
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.streams.values import Version


def verify_version(store: ObjectStore, version: Version) -> tuple[Manifest | None, str]:
    """The manifest and "", or the first problem, which names the tensor and the object.

    (1) every file and, if one differs, the tensor in it; (2) every tensor, made from the stored
    objects as a reader without any tensors would make it.
    """
    manifest = None
    try:
        manifest = read_manifest(store, version)
        for problem in _files(store, manifest):  # 1
            return manifest, problem
        ResidentWeights().move(store, version)  # 2
    except (ObjectMissing, CorruptObject) as error:
        return manifest, str(error)
    return manifest, ""


def _files(store: ObjectStore, manifest: Manifest) -> Iterator[str]:
    """Problems of the version's own objects, with one file in memory at a time."""
    folder = version_folder(manifest.version)
    for file in manifest.files:
        try:
            data = store.get(f"{folder}/{file.name}")
        except ObjectMissing as error:
            yield str(error)
            continue
        if len(data) != file.bytes or content_hash(data) != file.hash:
            names = ", ".join(_damaged(manifest, file, data)) or "its header"
            yield f"object {folder}/{file.name} differs from its hash: {names}"


def _damaged(manifest: Manifest, file: FileEntry, data: bytes) -> Iterator[str]:
    for name, entry in manifest.weights.tensors.items():
        part = data[entry.start : entry.end]
        if entry.file == file.name and tensor_hash(entry.dtype, entry.shape, part) != entry.hash:
            yield f"tensor {name}"
    for name, step in manifest.delta.tensors.items() if manifest.delta else ():
        if step.file == file.name and content_hash(data[step.start : step.end]) != step.payload:
            yield f"tensor {name}"
