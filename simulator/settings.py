"""What `rollstream simulate` is told. One docstring line per field; how it becomes runs is
`simulator/experiment.py`.
"""

from pydantic import Field

from storage.settings import Settings


class ClusterSettings(Settings):
    """One model on so many GPUs."""

    model: str = "qwen2.5-7b"
    """A name of MODELS in simulator/constants.py."""
    gpus: int = Field(default=64, ge=1, le=65_536)
    """All of them, rollouts and trainer."""
    rollout_share: float | None = Field(default=None, gt=0, lt=1)
    """GPUs of rollouts where a policy parts them; without it each policy gets its fastest of three.
    """
    tp: int | None = Field(default=None, ge=1, le=64)
    """GPUs of one replica; default: the model's."""


class LengthPart(Settings):
    """One log-normal part of a mixture."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the answers, relative to the others."""
    median: float = Field(ge=1, le=1e9)
    """Half of its answers are shorter."""
    p99: float = Field(ge=1, le=1e9)
    """One in a hundred is longer."""


class LengthSettings(Settings):
    """Answer lengths; default: the constants' log-normal."""

    parts: tuple[LengthPart, ...] = Field(default=(), max_length=16)
    """A mixture instead."""
    trace: str | None = None
    """Recorded lengths instead: a text file with one a line, a Parquet file or an archive's folder.
    """
    column: str = "logprobs"
    """Of the Parquet files: a number, or a list whose length counts."""


class FaultSettings(Settings):
    """Rollouts that die and come back."""

    failures_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Of one rollout, without notice."""
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Of one rollout, with time to hand over its partials."""
    speeds: tuple[float, ...] = Field(default=(1.0,), min_length=1, max_length=1024)
    """Of the rollouts, taken in turn: 1 is as fast as the constants say."""


class SimulationSettings(Settings):
    """Clusters × policies, and what is trained on them."""

    seed: int = Field(default=0, ge=0)
    """Lengths and failures follow from it."""
    policies: tuple[str, ...] = (
        "synchronous", "one_step", "stream", "partial_rollout", "in_flight", "laminar", "rhymerl",
        "ours",
    )  # fmt: skip
    """The first is what the others' speed-up counts from; `ours-repack` leaves a mechanism out."""
    ablation: str | None = None
    """A policy that is also run without each of its mechanisms."""
    clusters: tuple[ClusterSettings, ...] = Field(default=(ClusterSettings(),), min_length=1)
    """Simulated one after another."""
    scale: int = Field(default=1, ge=1, le=1024)
    """Simulate this part of GPUs and groups: the same load per GPU, that much sooner."""
    prompts: int = Field(default=17_000, ge=1)
    """Of the data set, asked pass after pass."""
    queue_per_slot: float = Field(default=1.0, ge=0)
    """Waiting orders per slot, as `dispatch.queue_per_slot`."""
    dispatch_every_s: float = Field(default=0.25, ge=0)
    """Seconds between news and the plan that answers them."""
    lengths: LengthSettings = LengthSettings()
    """Of the answers."""
    faults: FaultSettings = FaultSettings()
    """What goes wrong."""
    constants: dict[str, float] = Field(default_factory=dict)
    """Other values for names of simulator/constants.py."""
