"""Verifies a stored version by all its hashes, and compares two versions as bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.delta.coding import element_of
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.manifest import FileEntry, Manifest, read_manifest, version_folder
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.shards import plan_shards
from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes, tensor_hash
from rollstream.streams.values import Version

BATCH_BYTES = 256 << 20  # bytes of tensors in memory at a time, for each of the two versions


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """All elements differ if only one version has the tensor, or if dtype or shape differ.
    `largest` is an absolute difference, None if not compared or not floats.
    """

    name: str
    elements: int
    changed: int
    largest: float | None


def compare_versions(
    store: ObjectStore, first: Manifest, second: Manifest
) -> Iterator[TensorDifference]:
    """Yields the differing tensors by their hashes, a tied one once: first those with equal dtype
    and shape, in the second version's order; then its others; then those that only the first has.
    """
    mine, other = first.weights, second.weights
    both = [name for name in other.tensors if name in mine.names]
    alike = {n for n in both if mine.entry(n).hash == other.entry(n).hash}
    # Other dtypes or shapes have no elements to compare.
    fits = [n for n in both if n not in alike and _form(first, n) == _form(second, n)]
    for names in plan_shards({name: other.entry(name).bytes for name in fits}, BATCH_BYTES):
        yield from _compared(store, first, second, names)
    for name in other.tensors.keys() - alike - set(fits):
        elements = int(np.prod(other.entry(name).shape))
        yield TensorDifference(name, elements, elements, None)
    for name in mine.tensors.keys() - set(other.names):
        elements = int(np.prod(mine.entry(name).shape))
        yield TensorDifference(name, elements, elements, None)


def _form(manifest: Manifest, name: str) -> tuple[object, ...]:
    entry = manifest.weights.entry(name)
    return entry.dtype, entry.shape


def _compared(
    store: ObjectStore, first: Manifest, second: Manifest, names: Sequence[str]
) -> Iterator[TensorDifference]:
    _, before = fetch_tensors(store, first.version, tensors=names)
    _, after = fetch_tensors(store, second.version, tensors=names)
    for name in names:
        bits = element_of(DTYPE_NAMES[after[name].dtype]).bits
        old, new = (np.frombuffer(tensor_bytes(t[name]), bits) for t in (before, after))
        changed = int(np.count_nonzero(old != new))
        yield TensorDifference(name, len(new), changed, _largest(before[name], after[name]))


def _largest(before: torch.Tensor, after: torch.Tensor) -> float | None:
    if not after.is_floating_point() or not after.numel():
        return None
    return float((after.double() - before.double()).abs().max())


def verify_version(store: ObjectStore, version: Version) -> tuple[Manifest | None, str]:
    """Returns the manifest, None if it cannot be read, and the first problem, with the names of
    tensor and object; "" for none.

    1. Compare every file with its hash; in a damaged file compare each tensor, to name the wrong
       ones.
    2. Make every tensor as a reader without tensors would, for a delta also from earlier versions'
       files.
    """
    manifest = None
    try:
        manifest = read_manifest(store, version)
        for problem in _files(store, manifest):  # 1
            return manifest, problem
        ResidentWeights().update(store, version)  # 2
    except (ObjectMissing, CorruptObject) as error:
        return manifest, str(error)
    return manifest, ""


def _files(store: ObjectStore, manifest: Manifest) -> Iterator[str]:
    folder = version_folder(manifest.version)
    for file in manifest.files:
        try:
            # One file at a time is in memory.
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
