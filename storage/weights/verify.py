"""Compares two versions of a run, tensor by tensor, as bits."""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollstream.storage.weights.delta.coding import element_of
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.shards import plan_shards
from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes
from rollstream.storage.weights.fetch_part import fetch_tensors

BATCH_BYTES = 256 << 20  # of tensors in memory at a time, in both versions


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs: `changed` of `elements` elements, all of them if only one version has
    it or the shapes differ. `largest` is the largest absolute difference, None if there is none.
    """

    name: str
    elements: int
    changed: int
    largest: float | None


def compare_versions(store: ObjectStore, first: Manifest, second: Manifest) -> Iterator[TensorDifference]:
    """Tensors that differ, in the order of the second version; then those that only the first
    has.
    """
    mine, other = first.weights, second.weights
    both = [name for name in other.tensors if name in mine.names]
    alike = {n for n in both if mine.entry(n).hash == other.entry(n).hash}
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
