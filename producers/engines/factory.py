"""Opens engines. `open_engine` opens one that computes a model, by its name: `torch` comes with
Rollstream, `vllm` is an extra dependency. `open_paced` opens the engine `paced`, which computes no
model: it takes the time and draws the answer lengths that its settings describe.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.base import Engine, EngineOptions
from rollstream.producers.engines.paced.engine import PacedEngine, PacedShape, ScaledClock
from rollstream.producers.engines.paced.lengths import (
    LengthSampler,
    LogNormal,
    mixture_of,
    read_trace,
)
from rollstream.producers.engines.paced.settings import (
    LengthSettings,
    PacedSettings,
    RooflineSettings,
)
from rollstream.producers.engines.profile import read_profile
from rollstream.producers.engines.roofline import Roofline, roofline_of_hardware
from rollstream.producers.settings import VllmSettings
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def open_engine(
    name: str,
    model_config: "PreTrainedConfig",
    tensors: Mapping[str, torch.Tensor],
    version: Version,
    options: EngineOptions,
    *,
    vllm: VllmSettings | None = None,
) -> Engine:
    """Open the engine `name`, `torch` or `vllm`, which serves `tensors` as `version`. `vllm` holds
    the settings of the engine `vllm` and is ignored by others.

    Raises `ConfigurationError` for another name and for an engine that is not installed, and
    `EngineRefused` for a model that the engine cannot serve.
    """
    # An engine is imported where it is opened: a paced run imports no model code, and vLLM is
    # installed only where it is configured.
    if name == "torch":
        from rollstream.producers.engines.torch.engine import TorchEngine

        kind: torch.dtype = getattr(torch, options.dtype)
        return TorchEngine(model_config, tensors, version, options, dtype=kind)
    if name == "vllm":
        from rollstream.producers.engines.vllm.engine import VllmEngine

        return VllmEngine(model_config, tensors, version, options, settings=vllm)
    raise ConfigurationError(
        f"rollouts.engine: no engine {name!r} computes a model; there are 'torch' and 'vllm'"
    )


def open_paced(
    settings: PacedSettings,
    vocabulary: int,
    tensors: Mapping[str, torch.Tensor],
    version: Version,
    *,
    slots: int,
    context_max: int,
) -> PacedEngine:
    """Open the engine `paced`. Its steps take the time that a model on the described accelerator
    would take, divided by `settings.time_scale`; its tokens are below `vocabulary`. `tensors` are
    served as `version` and updated like a model's, but compute nothing.
    """
    kv_tokens = settings.kv_tokens
    shape = PacedShape(
        slots=slots,
        context_max=context_max,
        kv_capacity=slots * context_max if kv_tokens is None else kv_tokens,
        vocabulary=vocabulary,
        roofline=roofline_from(settings.roofline),
        lengths=lengths_from(settings.lengths),
        emit_every=settings.emit_every,
    )
    return PacedEngine(shape, tensors, version, ScaledClock(settings.time_scale))


def roofline_from(settings: RooflineSettings) -> Roofline:
    """Returns the roofline, which gives the time of a step by its batch and KV cache: that of the
    profile file if the settings name one (`rollstream profile` measures it), else that of the
    accelerator and model that they describe.
    """
    if settings.profile is not None:
        return read_profile(settings.profile).roofline
    return roofline_of_hardware(
        settings.model_bytes,
        settings.bandwidth,
        settings.kv_token_bytes,
        settings.token_flops,
        settings.flops,
        settings.overhead_s,
    )


def lengths_from(settings: LengthSettings) -> LengthSampler:
    """Returns a sampler of answer lengths: from the recorded lengths of a trace if the settings
    name one, else from their mixture of log-normal parts, else from one log-normal distribution.
    """
    if settings.trace is not None:
        return LengthSampler(read_trace(settings.trace), settings.correlation)
    parts = [(part.weight, LogNormal(part.median, part.p99)) for part in settings.parts]
    whole = LogNormal(settings.median, settings.p99)
    return LengthSampler(mixture_of(parts or [(1.0, whole)]), settings.correlation)
