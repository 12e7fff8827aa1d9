"""Settings of what reads the log: trainer, dispatch and archive. One docstring line per field."""

from typing import Literal

from pydantic import Field

from storage.settings import Settings


class DispatchSettings(Settings):
    """Admission, placement, recovery."""

    max_lag: int | None = Field(default=4, ge=0)
    """η: no token is trained at a lag above it; None is bounded by `ready_groups_max` only."""
    ready_groups_max: int = Field(default=256, ge=1)
    """Most admitted groups not yet trained when `max_lag` is None."""
    queue_per_slot: float = Field(default=0.25, ge=0)
    """Waiting orders per slot of a rollout, so that slots stay busy while dispatch is away."""
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """A rollout without a heartbeat for longer has its trajectories resumed elsewhere."""
    stuck_timeout_s: float = Field(default=300.0, gt=0)
    """So has one whose heartbeats report for longer that its loop has not turned."""
    repack: bool = True
    """Under `keep_version`: gather the last trajectories of a version on few rollouts, so that the
    others stand empty and take the newest (docs/scheduling.md).
    """
    repack_every_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks at what could be gathered, beside one after each new version."""
    load_bytes_per_s: float = Field(default=2e8, gt=0)
    """At which a rollout is taken to read a version from the store; decides whether one that nobody
    holds is loaded for what was generated under it, or that starts again.
    """
    group_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds from admission until a group is closed with the survivors that it has."""
    lease_s: float = Field(default=10.0, gt=0)
    """Duration of the lease."""
    standby: bool = False
    """`run` starts a second dispatch, which takes the lease over when the first loses it."""
    keep_s: float = Field(default=5.0, gt=0)
    """Seconds between two notes of its state: a successor reads the log from the last one on."""


class TrainerSettings(Settings):
    """One step: choice of groups, loss, update, publication."""

    steps: int = Field(default=60, ge=1)
    """Versions to train; the run ends after the last."""
    learner: Literal["torch", "paced"] = "torch"
    """`torch` trains a model; `paced` only keeps time (docs/paced.md)."""
    groups_per_step: int = Field(default=24, ge=1)
    """B: groups that one step trains (a wave)."""
    samples_per_group: int = Field(default=8, ge=1)
    """Trajectories per prompt."""
    survivors_min: int = Field(default=2, ge=1)
    """A group with fewer living trajectories is closed as dead."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser updates per published version; the step's groups are divided among them."""
    choose: str = "oldest"
    """Which complete groups come first: `oldest`, `freshest`, or `module:function`."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most padded tokens of one forward and backward pass."""
    workers: int = Field(default=2, ge=1)
    """Threads that train micro-batches side by side; gradients are added in micro-batch order
    whoever is first.
    """
    threads: int = Field(default=1, ge=1)
    """Torch threads per worker; `processes` share them."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes of this machine that train one model together, each with a slice of it
    (docs/sharded.md); with `device = "cuda"` each takes a GPU of its own.
    """
    compute: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward passes compute in; masters, their update and the head stay
    float32.
    """
    gradient_checkpointing: bool = False
    """Compute each layer's activations once more in the backward pass instead of keeping them."""
    device: str = Field(default="cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$")
    """Where it computes: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA where there is one)."""
    lr: float = Field(default=5e-4, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay."""
    lr_ramp_steps: int = Field(default=5, ge=0)
    """Linear warm-up, in updates."""
    lr_final: float = Field(default=0.2, ge=0, le=1)
    """Share of the peak reached linearly at the last step."""
    gradient_norm_max: float = Field(default=1.0, gt=0)
    """Clipping."""
    advantage: Literal["grpo", "centred", "leave_one_out"] = "grpo"
    """(R − mean)/std, R − mean, or R − mean of the others."""
    loss: Literal["truncated_is", "ppo_clip"] = "truncated_is"
    """Policy gradient with truncated importance weights, or the clipped surrogate with clip-higher.
    """
    ratio_max: float = Field(default=2.0, gt=0)
    """Truncation of π/μ for `truncated_is`."""
    clip_low: float = Field(default=0.2, ge=0)
    """ε below 1 for `ppo_clip`."""
    clip_high: float = Field(default=0.28, ge=0)
    """ε above 1 for `ppo_clip`."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or per sequence (geometric mean, GSPO)."""
    aggregate: Literal["token", "sequence"] = "token"
    """Mean over all tokens of an update, or mean over sequences of their token means."""
    annotations: tuple[str, ...] = Field(default=(), max_length=16)
    """Annotations that a sample must have besides those in `reward_terms` before it is trained."""
    reward_terms: dict[str, float] = Field(
        default_factory=lambda: {"reward": 1.0}, min_length=1, max_length=16
    )
    """The reward is the sum of these annotations, each times its weight; `reward` is the sample's
    own where its rollout judged it.
    """
    filter_equal_rewards: bool = False
    """Close groups whose rewards are all equal as filtered instead of training zeros."""
    lease_s: float = Field(default=10.0, gt=0)
    """Duration of the lease."""
    ranks_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait of one of several trainer processes for another (docs/sharded.md)."""


class ArchiveSettings(Settings):
    """The log as Parquet files in the store, for analysis and replay."""

    enabled: bool = True
    """Run the archive beside the run."""
    roll_bytes: int = Field(default=256 << 20, ge=1)
    """Most record bytes of a topic held before a file is written, the fullest partition first."""
    roll_s: float = Field(default=300.0, gt=0)
    """Seconds after which a partition's records are written, however few they are."""
    topics: tuple[
        Literal["trajectories", "annotations", "ledger", "admissions", "applied"], ...
    ] = ("trajectories", "annotations", "ledger", "admissions", "applied")
    """What is archived."""
