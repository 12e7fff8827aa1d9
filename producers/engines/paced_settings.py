"""Settings of the engine `paced` and the learner `paced`. Used together they run the whole service
at scale without a model: lengths of answers are drawn, times of generation and training are
computed, and nothing is learnt (docs/explanation/paced-engine.md).

`PacedSettings` is the table `[paced]`; it contains `LengthSettings`, which describe the answers,
and `RooflineSettings`, which describe the accelerator. The docstrings are the text of
docs/reference/settings.md. `INCIDENTAL` settings may change between two starts of a run.
"""

from typing import Annotated

from pydantic import Field

from rollstream.storage.settings import INCIDENTAL, Settings


class LengthPartSettings(Settings):
    """One part of a mixture of answer lengths: a log-normal distribution."""

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """The part's share of the answers, relative to the weights of the other parts."""
    median: float = Field(default=1_600.0, ge=1, le=1e9)
    """Median of the part's answer lengths, in tokens."""
    p99: float = Field(default=16_000.0, ge=1, le=1e9)
    """99th percentile of the part's answer lengths, in tokens; at least the median."""


class LengthSettings(Settings):
    """Lengths of the answers before `rollouts.context_max` and `sampling.tokens_max` cut them: one
    log-normal distribution (`median`, `p99`), a mixture (`parts`) or recorded lengths (`trace`).
    """

    median: float = Field(default=1_600.0, ge=1, le=1e9)
    """Median of the answer lengths, in tokens."""
    p99: float = Field(default=16_000.0, ge=1, le=1e9)
    """99th percentile of the answer lengths, in tokens; at least the median."""
    parts: tuple[LengthPartSettings, ...] = Field(default=(), max_length=16)
    """A mixture in place of `median` and `p99`; each part is a table `[[paced.lengths.parts]]`."""
    trace: str | None = None
    """Recorded lengths in place of a distribution: a text file with one length per line."""
    correlation: float = Field(default=0.7, ge=0, le=1)
    """Correlation of the lengths of two answers to one prompt, in the same or another pass over the
    prompts; 0: independent, 1: equally long.
    """


class RooflineSettings(Settings):
    """The accelerator of a rollout and the model on it. A decode step takes the longer of memory
    reads and arithmetic, plus `overhead_s` (the roofline model). The defaults describe 7.6 billion
    parameters in bf16 on an H100 that reaches 80 % of its bandwidth and 60 % of its arithmetic.
    """

    model_bytes: float = Field(default=15.2e9, gt=0)
    """Bytes of the weights, all of which a decode step reads once."""
    bandwidth: float = Field(default=2.7e12, gt=0)
    """Bytes that the accelerator's memory delivers per second."""
    kv_token_bytes: float = Field(default=57_344, ge=0)
    """Bytes of the KV cache per token; a decode step reads those of all tokens of its sequences."""
    token_flops: float = Field(default=15.2e9, gt=0)
    """Floating-point operations of the model for one token, in decode and in prefill."""
    flops: float = Field(default=6e14, gt=0)
    """Floating-point operations that the accelerator does per second."""
    overhead_s: float = Field(default=2e-3, ge=0)
    """Seconds of a decode step in addition to memory reads and arithmetic."""
    profile: str | None = None
    """A file of `rollstream profile`, which measures a real engine. Its measured constants replace
    all other settings of this table.
    """


class PacedSettings(Settings):
    """The simulated model and accelerators of a run with `rollouts.engine = "paced"` and
    `trainer.learner = "paced"`, which require each other.
    """

    time_scale: Annotated[float, INCIDENTAL] = Field(default=1.0, gt=0, le=1e4)
    """Factor by which decode, prefill and training are faster than the settings describe; the rest
    of the service keeps its speed.
    """
    lengths: LengthSettings = LengthSettings()
    """Lengths of the answers."""
    roofline: Annotated[RooflineSettings, INCIDENTAL] = RooflineSettings()
    """The accelerator and the model, from which the times of decode and prefill are computed."""
    kv_tokens: Annotated[int | None, INCIDENTAL] = Field(default=None, ge=2)
    """Capacity of a rollout's KV cache in tokens, at least `rollouts.context_max`; default:
    `rollouts.slots` × `rollouts.context_max`, with which the cache is never full.
    """
    emit_every: Annotated[int, INCIDENTAL] = Field(default=256, ge=1)
    """Tokens that a trajectory gains before the engine passes them to its rollout; the rest is
    passed at the end of a turn.
    """
    weights_bytes: int = Field(default=500_000_000, ge=2)
    """Bytes of the weights in bf16."""
    changed_share: float = Field(default=0.01, gt=0, le=1)
    """Share of the weights' elements that one update of the weights changes."""
    train_step_s: Annotated[float, INCIDENTAL] = Field(default=5.0, ge=0)
    """Seconds of a training step in addition to those of its tokens (`train_token_s`)."""
    train_token_s: Annotated[float, INCIDENTAL] = Field(default=2e-5, ge=0)
    """Seconds for each token of the samples that a step trains, prompts included."""
