"""Tiny models with random adapters, and the same adapters merged into plain models."""

import copy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.producers.engines.base import WeightUpdate
from rollstream.storage.model_folder.lora import (
    adapter_state,
    attach_adapters,
    attached_adapter,
    base_state,
    merge_adapter,
)
from rollstream.storage.settings import LoraSettings
from rollstream.streams.values import Version

LORA = LoraSettings(rank=3, alpha=6.0)


def adapted(
    model: PreTrainedModel, lora: LoraSettings = LORA, seed: int = 0, size: float = 0.2
) -> PreTrainedModel:
    """A copy of the model with adapters that change what it computes."""
    own = copy.deepcopy(model)
    attach_adapters(own, lora, seed, torch.float32, "base")
    drawn = torch.Generator().manual_seed(seed)
    for name, parameter in own.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size, generator=drawn)
    return own


def adapter_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in adapter_state(model.state_dict()).items()}


def merged(model: PreTrainedModel, plain: PreTrainedModel) -> PreTrainedModel:
    """A copy of `plain` with the adapters of `model` in its own matrices."""
    adapter, own = attached_adapter(model), copy.deepcopy(plain)
    assert adapter is not None
    state = merge_adapter(base_state(model.state_dict()), adapter_of(model), adapter.scaling)
    own.load_state_dict(state)
    return own


def adapter_update(version: Version, model: PreTrainedModel) -> WeightUpdate:
    adapter = attached_adapter(model)
    assert adapter is not None
    return WeightUpdate(version, adapter_of(model), scaling=adapter.scaling)


def with_fault(update: WeightUpdate, fault: str, unknown: str) -> WeightUpdate:
    """The update with one wrong factor of an up_proj: `missing`, of another `shape`, `nan`, or a
    copy of it under the name `unknown`; as it is for any other fault.
    """
    tensors = dict(update.tensors)
    name = next(name for name in tensors if "up_proj.lora_B" in name)
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors[unknown] = tensors[name]
    elif fault in ("shape", "nan"):
        tensors[name] = tensors[name][:-1] if fault == "shape" else tensors[name] * torch.nan
    return replace(update, tensors=tensors)
