"""Keeps large versions in a file that an engine's processes map."""

from collections.abc import Collection, Mapping

import torch

from rollstream.producers.rollout.holder import CopyHolder
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.mapped import MappedTensors, MappedWeights
from rollstream.storage.weights.resident import ResidentUpdate
from rollstream.streams.values import Version


class MappedHolder(CopyHolder):
    """Keeps the copy in a file (`storage/weights/mapped.py`)."""

    def __init__(self) -> None:
        self._weights = MappedWeights()

    def renewed(self) -> "MappedHolder":
        return MappedHolder()

    def move(
        self, store: ObjectStore, version: Version, manifest_hash: str | None
    ) -> ResidentUpdate:
        return self._weights.update(store, version, manifest_hash)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._weights.tensors

    def damaged(
        self, tensors: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> tuple[str, ...]:
        assert isinstance(tensors, MappedTensors), "an update of this holder"
        return tuple(tensors.damaged(names))
