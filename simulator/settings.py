"""Settings of `rollstream simulate`, one docstring line per field; `simulator/experiment.py` runs
them.
"""

from pydantic import Field

from rollstream.storage.settings import Settings


class ClusterSettings(Settings):
    """One model on a number of GPUs."""

    model: str = "qwen2.5-7b"
    """A name of MODELS in simulator/constants.py."""
    gpus: int = Field(default=64, ge=1, le=65_536)
    """GPUs of rollouts and trainer together."""
    rollout_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the GPUs that generate, for policies with separate GPUs; default: each policy's
    fastest of three.
    """
    tp: int | None = Field(default=None, ge=1, le=64)
    """GPUs of one replica; default: the model's."""


class LengthPart(Settings):
    """One log-normal part of a mixture."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the answers, relative to the others."""
    median: float = Field(ge=1, le=1e9)
    """Median of its answers' lengths, in tokens."""
    p99: float = Field(ge=1, le=1e9)
    """99th percentile of its answers' lengths, in tokens."""


class AnswerLengthSettings(Settings):
    """Answer lengths; default: the constants' log-normal."""

    parts: tuple[LengthPart, ...] = Field(default=(), max_length=16)
    """A mixture in place of the log-normal."""
    trace: str | None = None
    """Recorded lengths in place of a distribution: a text file with one per line, a Parquet file,
    or the folder of an archive.
    """
    column: str = "logprobs"
    """Column of the Parquet files: a number, or a list whose length counts."""


class FaultSettings(Settings):
    """Rollouts that die and return."""

    failures_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Of one rollout, without notice."""
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Of one rollout, with time to publish its partials."""
    speeds: tuple[float, ...] = Field(default=(1.0,), min_length=1, max_length=1024)
    """Relative speeds of the rollouts; the list repeats. 1 is the speed of the constants."""


class SimulationSettings(Settings):
    """The clusters, the policies, and the workload."""

    seed: int = Field(default=0, ge=0)
    """Seed of lengths and failures."""
    policies: tuple[str, ...] = (
        "synchronous", "one_step", "stream", "partial_rollout", "in_flight", "laminar", "rhymerl",
        "ours",
    )  # fmt: skip
    """Policies; speed-ups count from the first. `ours-repack` leaves a mechanism out."""
    ablation: str | None = None
    """A policy that also runs without each of its mechanisms."""
    clusters: tuple[ClusterSettings, ...] = Field(default=(ClusterSettings(),), min_length=1)
    """Simulated one after another."""
    scale: int = Field(default=1, ge=1, le=1024)
    """Divide GPUs and groups by this number: the same load per GPU, simulated that much faster."""
    prompts: int = Field(default=17_000, ge=1)
    """Prompts of the data set, repeated pass after pass."""
    queue_per_slot: float = Field(default=1.0, ge=0)
    """Waiting assignments per slot, like `dispatch.queue_per_slot`."""
    dispatch_every_s: float = Field(default=0.25, ge=0)
    """Seconds between an event and the next dispatch round."""
    lengths: AnswerLengthSettings = AnswerLengthSettings()
    """Lengths of the answers."""
    faults: FaultSettings = FaultSettings()
    """Failures, preemptions and unequal speeds."""
    constants: dict[str, float] = Field(default_factory=dict)
    """Other values for constants of simulator/constants.py, by name."""
