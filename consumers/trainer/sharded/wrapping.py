"""A model of transformers under FSDP2 (Zhao et al., "PyTorch FSDP", arXiv 2304.11277; per-parameter
sharding of torch 2): each decoder layer a group of its own, the rest one more.

Gradients are summed over ranks, not averaged: an update divides by the weight of all its tokens,
which is known only at its end. With `bfloat16` layers compute in bf16 on a cast of the fp32 masters
and their gradients are summed in fp32; embedding, final norm and head stay fp32.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import warnings
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, compute: str) -> None:
    """In place; afterwards each rank holds its slice of every parameter."""
    # Scores are a view, and nothing writes into them: that is what it warns of, at every start.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    layers = decoder_layers(model)
    policy = MixedPrecisionPolicy()
    if compute == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        # What follows the last layer is fp32 and takes nothing else.
        is_last = layer is layers[-1] and compute == "bfloat16"
        own = replace(policy, output_dtype=torch.float32) if is_last else policy
        fully_shard(layer, mesh=mesh, mp_policy=own)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers names as those not to be split, in order; none for a model that
    names none: it is then gathered as a whole.
    """
    names = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return [module for module in model.modules() if type(module).__name__ in names]
