"""Keeps large versions in a file that an engine's processes map."""

from collections.abc import Collection, Mapping

import torch

from rollstream.producers.rollout.holder import CopyHolder
from rollstream.storage.weights.mapped import MappedTensors, MappedWeights


class MappedHolder(CopyHolder):
    """Keeps the copy in a file (`storage/weights/mapped.py`)."""

    copy = MappedWeights

    def damaged(
        self, tensors: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> tuple[str, ...]:
        assert isinstance(tensors, MappedTensors), "an update of this holder"
        return tuple(tensors.damaged(names))
