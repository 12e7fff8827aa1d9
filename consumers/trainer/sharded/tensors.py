"""Divides a model's parameters among the ranks: each holds consecutive rows of every parameter. For
publishing, whole tensors are gathered at the rank that owns each, or, if small, at every rank. The
gathering functions are collectives.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from rollstream.consumers.trainer.rank_plan import owners, rows_per_rank
from rollstream.consumers.trainer.sharded.ranks import Ranks
from rollstream.storage.model_folder.lora import attached_adapter, base_state
from rollstream.storage.weights.tensors import untie


def gather_rows(
    mine: Tensor,
    shape: tuple[int, ...],
    owner: int,
    ranks: Ranks,
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """The whole tensor, in new host memory, at rank `owner`, None at the others. `mine` are this
    rank's rows; with another process `group` than that of training they must be in host memory.
    """
    if ranks.size == 1:
        return mine.detach().to("cpu", copy=True)
    padded = _padded(mine.detach(), shape, ranks)
    parts = None
    if ranks.rank == owner:
        parts = [torch.empty_like(padded) for _ in range(ranks.size)]
    dist.gather(padded, parts, dst=owner, group=group)
    return None if parts is None else torch.cat(parts)[: shape[0]].to("cpu", copy=True)


def gather_everywhere(
    slices: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """The whole tensors as `dtype`, in new host memory at every rank. `slices` are this rank's
    rows.
    """
    padded = {name: _padded(rows.to(dtype), shapes[name], ranks) for name, rows in slices.items()}
    # One collective for all: they are small together, as an adapter's are.
    mine = torch.cat([rows.flatten() for rows in padded.values()])
    parts = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(parts, mine)  # pyright: ignore[reportUnknownMemberType]
    sizes = [rows.numel() for rows in padded.values()]
    split = [torch.split(part.cpu(), sizes) for part in parts]
    return {
        name: torch.cat([part[at].view(rows.shape) for part in split])[: shapes[name][0]].clone()
        for at, (name, rows) in enumerate(padded.items())
    }


def _padded(rows: Tensor, shape: tuple[int, ...], ranks: Ranks) -> Tensor:
    each = rows_per_rank(shape[0], ranks.size)
    if rows.shape[0] == each:
        return rows.contiguous()
    # Every rank sends the same number of rows.
    padded = rows.new_zeros((each, *shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded


class TensorOwnership:
    """Which rank owns each tensor, balanced by bytes; to be created before the model is sharded.

    A tensor is stored once: `names` are the stored names, and `tied` maps each further name to one
    of these. An adapter's tensors are in neither and have no owner.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        stored, tied = untie(base_state(model.state_dict()))
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        """Of the unsharded parameters, adapters included."""
        self.names, self.tied = tuple(stored), tied
        self._ranks = ranks
        self._buffers = [name for name in stored if name not in self.shapes]
        self._owners = owners({name: tensor.nbytes for name, tensor in stored.items()}, ranks.size)

    def gather(self, slices: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The whole parameters that this rank owns, as `dtype`, for a model without adapters. A
        collective.
        """
        mine: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            # One tensor at a time: little memory is needed besides the result.
            tensor = gather_rows(slices[name].to(dtype), shape, self._owners[name], self._ranks)
            if tensor is not None:
                mine[name] = tensor
        return mine

    def named(
        self, parameters: Mapping[str, Tensor], model: PreTrainedModel, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Returns this rank's tensors of a version: `parameters` (the result of `gather`) and its
        buffers, under all their names. Not a collective.
        """
        mine, values = dict(parameters), model.state_dict()
        for name in self._buffers:
            if self._owners[name] == self._ranks.rank:
                tensor = values[name].detach()
                published_type = dtype if tensor.is_floating_point() else tensor.dtype
                mine[name] = tensor.to("cpu", published_type, copy=True)
        tied = {name: mine[owner] for name, owner in self.tied.items() if owner in mine}
        return {**mine, **tied}


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, compute: str, offload: bool = False
) -> None:
    """Shards `model` in place by FSDP2 (Zhao et al., "PyTorch FSDP", arXiv 2304.11277): each
    decoder layer is an FSDP group, all other modules are one more.

    Gradients are summed over ranks, not averaged. With `compute` "bfloat16" layers compute in bf16,
    on a cast of the fp32 masters, and their gradients are summed in fp32; embedding, final norm and
    head stay fp32. With `offload` slices and gradients are in host memory. Beside adapters all
    parameters are frozen and held in `compute`, also embedding, final norm and head.
    """
    # FSDP2 warns of in-place writes into a returned view; no code writes into the scores.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    layers = decoder_layers(model)
    policy, is_frozen = MixedPrecisionPolicy(), attached_adapter(model) is not None
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, compute))
    if compute == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    place = OffloadPolicy()
    if offload:
        place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in layers:
        # The final norm and the head after the last layer are fp32 and need fp32 input.
        is_last = layer is layers[-1] and compute == "bfloat16" and not is_frozen
        layer_policy = replace(policy, output_dtype=torch.float32) if is_last else policy
        fully_shard(layer, mesh=mesh, mp_policy=layer_policy, offload_policy=place)
    root = policy if is_frozen else MixedPrecisionPolicy()
    fully_shard(model, mesh=mesh, mp_policy=root, offload_policy=place)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An update divides by the weight of all its tokens, known only at its end.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns them in order: modules of the classes in `_no_split_modules` of transformers. Without
    them the model is a single FSDP group, gathered as a whole.
    """
    names = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return [module for module in model.modules() if type(module).__name__ in names]
