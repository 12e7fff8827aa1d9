"""Tensors of one moment that are distributed over several processes, each whole in one of them.
Every process writes its own objects, in parallel.

The calling process collects what the manifest states about all of them and writes the manifest
last. Invariant 6 holds, since a process answers only once its objects are durable. The written
objects differ from those of a single process only in the names of the files.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TypeVar

import torch

from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.manifest import Delta, Manifest, TensorFiles
from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes, tensor_hash, untie

_V = TypeVar("_V")


class DistributedTensors(ABC):
    """Every call raises an error that any of the processes raised."""

    @abstractmethod
    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        """As `write_shards` in `shards.py`; the files of each process have a stem of their own."""

    @abstractmethod
    def differences(self, parent: Manifest, base: "DistributedTensors") -> "DistributedDifferences":
        """As `encode_version` in `publish.py`; `base` are the parent's tensors, distributed
        alike.
        """

    @abstractmethod
    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        """Hash by name, and the names that share another tensor's memory."""


class DistributedDifferences(ABC):
    """Encoded tensors, each in the process that holds the tensor."""

    weights: TensorFiles
    bytes: int
    """Size of all payloads."""

    @abstractmethod
    def write(self, store: ObjectStore, folder: str, parent: Manifest, shard_bytes: int) -> Delta:
        """As `write_delta` in `publish.py`."""


Tensors = Mapping[str, torch.Tensor] | DistributedTensors
"""Tensors of one process, or distributed over several."""


def local_tensors(tensors: Tensors) -> Mapping[str, torch.Tensor]:
    """The tensors of one process; distributed ones are a programmer error."""
    assert not isinstance(tensors, DistributedTensors), "these tensors are in several processes"
    return tensors


def tensor_hashes(tensors: Tensors) -> tuple[dict[str, str], dict[str, str]]:
    """Hash of each tensor by name, tied ones once, and the tied names."""
    if isinstance(tensors, DistributedTensors):
        return tensors.identities()
    kept, tied = untie(tensors)
    hashes = {
        name: tensor_hash(DTYPE_NAMES[t.dtype], tuple(t.shape), tensor_bytes(t))
        for name, t in kept.items()
    }
    return hashes, tied


def merge_files(parts: Iterable[TensorFiles]) -> TensorFiles:
    """The files of all processes as one."""
    found = list(parts)
    return TensorFiles(
        tuple(chain.from_iterable(part.files for part in found)),
        merge_disjoint(part.tensors for part in found),
        merge_disjoint(part.tied for part in found),
    )


def merge_delta(parts: Iterable[Delta], parent: Manifest) -> Delta:
    """The delta files of all processes as one."""
    found = list(parts)
    files = tuple(chain.from_iterable(part.files for part in found))
    return Delta(parent.hash, files, merge_disjoint(part.tensors for part in found))


def merge_disjoint(parts: Iterable[Mapping[str, _V]]) -> dict[str, _V]:
    """The union of disjoint parts."""
    found: dict[str, _V] = {}
    for part in parts:
        assert found.keys().isdisjoint(part), "two processes hold the same tensor"
        found.update(part)
    return found
