"""Tensors of one moment that lie in several processes, each whole in one of them, and what is done
with them there: every process writes its own objects, side by side.

The process that asks gets what the manifest says of all of them together, and writes that last:
invariant 6 holds, since an object is durable when its process has answered. What is written differs
from one process's in the names of the files alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TypeVar

import torch

from storage.manifest import Delta, Manifest, TensorFiles
from storage.objects import ObjectStore
from storage.tensors import DTYPE_NAMES, tensor_bytes, tensor_hash, untie

_V = TypeVar("_V")


class Spread(ABC):
    """Every call raises what any of the processes met."""

    @abstractmethod
    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        """As `shards.write_shards`, the files of each process under a stem of its own."""

    @abstractmethod
    def differences(self, parent: Manifest, base: "Spread") -> "SpreadDifferences":
        """As `differences.encode_version`; `base` are the parent's tensors, spread alike."""

    @abstractmethod
    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        """Hash by name, and the names that share another's memory."""


class SpreadDifferences(ABC):
    """Encoded tensors, each where its tensor lies."""

    weights: TensorFiles
    bytes: int
    """Of all payloads."""

    @abstractmethod
    def write(self, store: ObjectStore, folder: str, parent: Manifest, shard_bytes: int) -> Delta:
        """As `differences.write_delta`."""


Tensors = Mapping[str, torch.Tensor] | Spread
"""Of one process, or of several."""


def whole(tensors: Tensors) -> Mapping[str, torch.Tensor]:
    """Those of one process; several have none that are whole."""
    assert not isinstance(tensors, Spread), "these tensors lie in several processes"
    return tensors


def identities(tensors: Tensors) -> tuple[dict[str, str], dict[str, str]]:
    """Hash of each tensor by name, tied ones once, and the tied names."""
    if isinstance(tensors, Spread):
        return tensors.identities()
    kept, tied = untie(tensors)
    hashes = {
        name: tensor_hash(DTYPE_NAMES[t.dtype], tuple(t.shape), tensor_bytes(t))
        for name, t in kept.items()
    }
    return hashes, tied


def merged_files(parts: Iterable[TensorFiles]) -> TensorFiles:
    """What the processes wrote, as one."""
    found = list(parts)
    return TensorFiles(
        tuple(chain.from_iterable(part.files for part in found)),
        merged(part.tensors for part in found),
        merged(part.tied for part in found),
    )


def merged_delta(parts: Iterable[Delta], parent: Manifest) -> Delta:
    """What the processes wrote of a delta, as one."""
    found = list(parts)
    files = tuple(chain.from_iterable(part.files for part in found))
    return Delta(parent.hash, files, merged(part.tensors for part in found))


def merged(parts: Iterable[Mapping[str, _V]]) -> dict[str, _V]:
    """Disjoint parts as one."""
    found: dict[str, _V] = {}
    for part in parts:
        assert found.keys().isdisjoint(part), "two processes hold the same tensor"
        found.update(part)
    return found
