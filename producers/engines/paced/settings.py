"""Settings of the paced engine and of the paced trainer, which computes nothing. One docstring line
per field.
"""

from typing import Annotated

from pydantic import Field

from rollstream.storage.settings import INCIDENTAL, Settings


class LengthPartSettings(Settings):
    """One log-normal part of a mixture of lengths."""

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Its share of the answers, relative to the other parts."""
    median: float = Field(default=1_600.0, ge=1, le=1e9)
    """Half of its answers are shorter, in tokens."""
    p99: float = Field(default=16_000.0, ge=1, le=1e9)
    """One in a hundred of its answers is longer."""


class LengthSettings(Settings):
    """Lengths of answers before the limits of context and `tokens_max`."""

    median: float = Field(default=1_600.0, ge=1, le=1e9)
    """Half of the answers are shorter, in tokens."""
    p99: float = Field(default=16_000.0, ge=1, le=1e9)
    """One in a hundred answers is longer (log-normal)."""
    parts: tuple[LengthPartSettings, ...] = Field(default=(), max_length=16)
    """A mixture in place of `median` and `p99`, each part a `[[paced.lengths.parts]]`."""
    trace: str | None = None
    """Recorded lengths in place of a distribution: a text file with one length a line."""
    correlation: float = Field(default=0.7, ge=0, le=1)
    """Correlation of the lengths of two answers to one prompt, in all passes; 1: equally long."""


class RooflineSettings(Settings):
    """An accelerator and the model on it; default: 7.6 billion parameters in bf16 on an H100 that
    reaches 80 % of its bandwidth and 60 % of its arithmetic.
    """

    model_bytes: float = Field(default=15.2e9, gt=0)
    """Bytes of weights, read once per decode step."""
    bandwidth: float = Field(default=2.7e12, gt=0)
    """Bytes that the accelerator's memory delivers per second."""
    kv_token_bytes: float = Field(default=57_344, ge=0)
    """Bytes of KV cache per token, read in every step of its sequence."""
    token_flops: float = Field(default=15.2e9, gt=0)
    """Floating-point operations per token."""
    flops: float = Field(default=6e14, gt=0)
    """Floating-point operations per second."""
    overhead_s: float = Field(default=2e-3, ge=0)
    """Seconds of a step in addition to memory reads and arithmetic."""
    profile: str | None = None
    """A file written by `rollstream profile`: its constants replace all of these."""


class PacedSettings(Settings):
    """The simulated model and accelerators under `rollouts.engine = "paced"` and
    `trainer.learner = "paced"`.
    """

    time_scale: Annotated[float, INCIDENTAL] = Field(default=1.0, gt=0, le=1e4)
    """Decode, prefill and training run this many times faster than their configured times."""
    lengths: LengthSettings = LengthSettings()
    """Lengths of the answers."""
    roofline: Annotated[RooflineSettings, INCIDENTAL] = RooflineSettings()
    """Constants from which the times of decode and prefill are computed."""
    kv_tokens: Annotated[int | None, INCIDENTAL] = Field(default=None, ge=2)
    """KV capacity of a rollout in tokens; default slots × context_max, which is never full."""
    emit_every: Annotated[int, INCIDENTAL] = Field(default=256, ge=1)
    """Tokens of a trajectory between two emissions."""
    weights_bytes: int = Field(default=500_000_000, ge=2)
    """Size of a version in bf16."""
    changed_share: float = Field(default=0.01, gt=0, le=1)
    """Share of the weights' elements that a step changes."""
    train_step_s: Annotated[float, INCIDENTAL] = Field(default=5.0, ge=0)
    """Seconds of a training step, in addition to those of its tokens."""
    train_token_s: Annotated[float, INCIDENTAL] = Field(default=2e-5, ge=0)
    """Seconds of each trained token."""
