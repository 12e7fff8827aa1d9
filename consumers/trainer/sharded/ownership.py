"""Gathers each whole tensor at the rank that owns it, under its checkpoint names."""

# pyright: reportUnknownMemberType=false

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.trainer.sharded.rank_plan import owners
from rollstream.consumers.trainer.sharded.tensors import gather_rows
from rollstream.consumers.trainer.sharded.ranks import Ranks
from rollstream.storage.weights.tensors import untie


class TensorOwnership:
    """The owners of a model's tensors, planned before it is sharded; a tensor with several names
    has one owner.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        kept, self._tied = untie(model.state_dict())
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        """Shapes of the unsharded parameters by name."""
        self._ranks = ranks
        self._buffers = [name for name in kept if name not in self.shapes]
        self._owners = owners({name: tensor.nbytes for name, tensor in kept.items()}, ranks.size)

    def gather(self, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole parameters that this rank owns; a collective."""
        mine: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            whole = gather_rows(slices[name], shape, self._owners[name], self._ranks)
            if whole is not None:
                mine[name] = whole
        return mine

    def named(
        self, parameters: Mapping[str, Tensor], model: PreTrainedModel, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """`parameters`, the buffers that this rank owns, and the tied names of both: the tensors
        that this rank contributes to a version.
        """
        mine, values = dict(parameters), model.state_dict()
        for name in self._buffers:
            if self._owners[name] == self._ranks.rank:
                tensor = values[name].detach()
                wanted = dtype if tensor.is_floating_point() else tensor.dtype
                mine[name] = tensor.to("cpu", wanted, copy=True)
        tied = {name: mine[owner] for name, owner in self._tied.items() if owner in mine}
        return {**mine, **tied}
