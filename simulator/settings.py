"""Settings of `rollstream simulate`."""

from pydantic import Field

from rollstream.storage.settings import Settings


class ClusterSettings(Settings):
    """One model on a number of GPUs."""

    model: str = "qwen2.5-7b"
    """Name of the model, one of MODELS in simulator/constants.py."""
    gpus: int = Field(default=64, ge=1, le=65_536)
    """GPUs of rollouts and trainer together."""
    rollout_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the GPUs that generate, for policies whose trainer has GPUs of its own; default: of
    1/4, 1/2 and 3/4, the share under which the policy is fastest.
    """
    tp: int | None = Field(default=None, ge=1, le=64)
    """GPUs of one rollout (tensor parallel); default: the number that MODELS has for the model."""


class LengthPart(Settings):
    """One log-normal part of a mixture of answer lengths."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """The part's share of the answers, relative to the weights of the other parts."""
    median: float = Field(ge=1, le=1e9)
    """Median of the part's answer lengths, in tokens."""
    p99: float = Field(ge=1, le=1e9)
    """99th percentile of the part's answer lengths, in tokens."""


class AnswerLengthSettings(Settings):
    """Lengths of the answers; default: a log-normal distribution whose median and 99th percentile
    are constants of simulator/constants.py.
    """

    parts: tuple[LengthPart, ...] = Field(default=(), max_length=16)
    """A mixture of log-normal parts, in place of the default."""
    trace: str | None = None
    """Recorded lengths, in place of a distribution: a text file with one length per line, a Parquet
    file, or the folder of an archive.
    """
    column: str = "logprobs"
    """Column of the Parquet files that gives the length: a number, or a list, whose number of items
    is the length.
    """


class EnvironmentSettings(Settings):
    """An environment (tools, a sandbox) that works between the turns of an answer, while the answer
    waits; default: there is none.
    """

    turns_mean: float = Field(default=1.0, ge=1, le=1e4)
    """Mean number of turns of an answer, geometrically distributed; 1: answers never wait."""
    wait_median_s: float = Field(default=1.0, gt=0)
    """Median of the seconds between two turns."""
    wait_p99_s: float = Field(default=10.0, gt=0)
    """99th percentile of the seconds between two turns."""
    holds_kv: bool = True
    """The tokens of a waiting answer stay in the KV cache; false: they are prefilled again."""


class FaultSettings(Settings):
    """Failures, preemptions and unequal speeds of rollouts. A failed or preempted rollout returns
    after a repair.
    """

    failures_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Failures of each rollout. They come without notice and lose the tokens since the last
    partial.
    """
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Preemptions of each rollout. They come with notice, so that the rollout publishes its
    partials and no token is lost.
    """
    speeds: tuple[float, ...] = Field(default=(1.0,), min_length=1, max_length=1024)
    """Relative speeds of the rollouts; if the list is shorter than their number, it repeats. 1 is
    the speed that follows from the constants.
    """


class SimulationSettings(Settings):
    """The clusters, the scheduling policies, and the workload that each policy runs there."""

    seed: int = Field(default=0, ge=0)
    """Seed of lengths and failures."""
    policies: tuple[str, ...] = (
        "synchronous", "one_step", "stream", "partial_rollout", "in_flight", "laminar", "rhymerl",
        "ours",
    )  # fmt: skip
    """Policies by name; their speeds are stated relative to the first one's. A name with `-` leaves
    out a mechanism: `ours-repack` is `ours` without repack.
    """
    ablation: str | None = None
    """A policy that is also simulated without each single one of its mechanisms."""
    clusters: tuple[ClusterSettings, ...] = Field(default=(ClusterSettings(),), min_length=1)
    """The clusters, simulated one after another."""
    scale: int = Field(default=1, ge=1, le=1024)
    """GPUs and groups are divided by this number: the load per GPU stays the same, and the
    simulation takes that much less time.
    """
    prompts: int = Field(default=17_000, ge=1)
    """Number of prompts in the data set, which is repeated pass after pass."""
    queue_per_slot: float = Field(default=1.0, ge=0)
    """Assignments that may wait at a rollout per slot, like `dispatch.queue_per_slot`; a slot is a
    place for one running sequence.
    """
    dispatch_every_s: float = Field(default=0.25, ge=0)
    """Seconds between an event and the next round of dispatch, which plans for it."""
    lengths: AnswerLengthSettings = AnswerLengthSettings()
    """Lengths of the answers."""
    environment: EnvironmentSettings = EnvironmentSettings()
    """Waits of answers with several turns."""
    faults: FaultSettings = FaultSettings()
    """Failures, preemptions and unequal speeds of rollouts."""
    constants: dict[str, float] = Field(default_factory=dict)
    """Values that replace constants of simulator/constants.py, by name."""
