"""Shards a transformers model by FSDP2 (Zhao et al., "PyTorch FSDP", arXiv 2304.11277;
per-parameter sharding of torch 2): each decoder layer is a group of its own, the rest is one more.

Gradients are summed over ranks, not averaged: an update divides by the weight of all its tokens,
which is known only at its end. With `bfloat16`, layers compute in bf16 on a cast of the fp32
masters and their gradients are summed in fp32; embedding, final norm and head stay fp32.
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
    """Shard `model` in place; afterwards each rank holds its slice of every parameter."""
    # The warning is about in-place writes into returned views; nothing writes into the scores.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    layers = decoder_layers(model)
    policy = MixedPrecisionPolicy()
    if compute == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        # Final norm and head after the last layer are fp32 and need fp32 input.
        is_last = layer is layers[-1] and compute == "bfloat16"
        own = replace(policy, output_dtype=torch.float32) if is_last else policy
        fully_shard(layer, mesh=mesh, mp_policy=own)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers lists as not to be split (`_no_split_modules`), in order. A
    model that lists none has one group and is gathered as a whole.
    """
    names = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return [module for module in model.modules() if type(module).__name__ in names]
