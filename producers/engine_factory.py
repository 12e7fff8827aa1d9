"""Opens an engine that computes a model, without a run (`open_engine`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.kind import engine_kind
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class ConfiguredModel:
    configuration: "PreTrainedConfig"

    def vocabulary(self) -> int:
        return int(self.configuration.vocab_size)

    def config(self) -> "PreTrainedConfig":
        return self.configuration


@dataclass(frozen=True, slots=True)
class _EngineAlone:
    rollouts: RolloutSettings


def open_engine(
    name: str,
    model_config: "PreTrainedConfig",
    tensors: Mapping[str, torch.Tensor],
    version: Version,
    options: EngineOptions,
    *,
    vllm: VllmSettings | None = None,
) -> Engine:
    """Raises `ConfigurationError` for an engine that computes no model, is not there or not
    installed, and `EngineRefused` for a model that it cannot serve.
    """
    kind = engine_kind(name)
    if not kind.has_model:
        raise ConfigurationError(f"rollouts.engine: {name!r} computes no model")
    alone = _EngineAlone(RolloutSettings(engine=name, vllm=vllm or VllmSettings()))
    return kind.open(alone, ConfiguredModel(model_config), tensors, version, options)
