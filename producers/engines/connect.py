"""Engines by name. `torch` is embedded; others come with their own back ends."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from producers.engines.base import Engine
from producers.engines.torch_engine import TorchEngine
from streams.errors import ConfigurationError
from streams.records import Version

LATER = {
    "vllm": "vLLM on real GPUs, planned",
    "paced": "the contract without a model, planned",
}


def open_engine(
    name: str,
    model_config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    version: Version,
    *,
    slots: int,
    context_max: int,
    device: str = "cpu",
) -> Engine:
    """The engine of this name, serving `version`. `ConfigurationError` for a name that there is not
    (yet).
    """
    if name == "torch":
        return TorchEngine(model_config, tensors, version, slots, context_max, device=device)
    if name in LATER:
        raise ConfigurationError(
            f"rollouts.engine: {name!r} is not there yet ({LATER[name]}); use 'torch'"
        )
    raise ConfigurationError(f"rollouts.engine: no engine {name!r}; there is 'torch'")
