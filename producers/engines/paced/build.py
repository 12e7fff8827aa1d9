"""Builds the engine `paced` and its parts from their settings."""

from collections.abc import Mapping

import torch

from rollstream.producers.engines.paced.engine import PacedEngine, ScaledClock
from rollstream.producers.engines.paced.lengths import (
    LengthSampler,
    LogNormal,
    mixture_of,
    read_trace,
)
from rollstream.producers.engines.paced_settings import (
    LengthSettings,
    PacedSettings,
    RooflineSettings,
)
from rollstream.producers.engines.profile import read_profile
from rollstream.producers.engines.roofline import Roofline, roofline_of_hardware
from rollstream.streams.values import Version


def open_paced(
    settings: PacedSettings,
    vocabulary: int,
    tensors: Mapping[str, torch.Tensor],
    version: Version,
    *,
    slots: int,
    context_max: int,
) -> PacedEngine:
    """Open the engine `paced`, whose tokens are below `vocabulary`. `tensors` are served as
    `version` and updated, but compute nothing.
    """
    kv_tokens = settings.kv_tokens
    return PacedEngine(
        tensors,
        version,
        ScaledClock(settings.time_scale),
        slots=slots,
        context_max=context_max,
        kv_capacity=slots * context_max if kv_tokens is None else kv_tokens,
        vocabulary=vocabulary,
        roofline=roofline_from(settings.roofline),
        lengths=lengths_from(settings.lengths),
        emit_every=settings.emit_every,
    )


def roofline_from(settings: RooflineSettings) -> Roofline:
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
    if settings.trace is not None:
        return LengthSampler(read_trace(settings.trace), settings.correlation)
    parts = [(part.weight, LogNormal(part.median, part.p99)) for part in settings.parts]
    distribution = LogNormal(settings.median, settings.p99)
    return LengthSampler(mixture_of(parts or [(1.0, distribution)]), settings.correlation)
