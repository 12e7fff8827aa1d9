"""Settings of the roles that read the log: trainer, dispatch and archive.

Between two starts of a run a setting marked `INCIDENTAL` may change, one marked `FIXED` may not,
and any other only with `--accept-config` (`storage/settings.py`, `Scope`).
"""

from typing import Annotated, Literal

from pydantic import Field

from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.storage.settings import FIXED, INCIDENTAL, PROMPTED, TAKEN, Settings


class DispatchSettings(Settings):
    """Admission, placement, recovery."""

    max_lag: Annotated[int | None, TAKEN] = Field(default=4, ge=0)
    """η: no token is trained at a lag above it; null leaves `ready_groups_max` as the only bound.
    Default under `keep_version`: null (docs/explanation/scheduling.md).
    """
    ready_groups_max: int = Field(default=256, ge=1)
    """Most admitted groups that no step has taken, when `max_lag` is null. Default under
    `keep_version`: 4 × `trainer.groups_per_step`.
    """
    queue_per_slot: Annotated[float, INCIDENTAL] = Field(default=0.25, ge=0)
    """Waiting assignments per slot of a rollout, so that slots stay busy while dispatch is down."""
    heartbeat_timeout_s: Annotated[float, INCIDENTAL] = Field(default=10.0, gt=0)
    """A rollout without a heartbeat for longer has its trajectories resumed on other rollouts."""
    stuck_timeout_s: Annotated[float, INCIDENTAL] = Field(default=300.0, gt=0)
    """The same for a rollout that sends heartbeats, but whose loop makes no progress for longer."""
    repack: Annotated[bool, INCIDENTAL] = True
    """Under `keep_version`: move the last trajectories of a version to few rollouts, so that the
    others become empty and load the newest version (docs/explanation/scheduling.md). Default with
    adapters: false, because nothing drains.
    """
    repack_every_s: Annotated[float, INCIDENTAL] = Field(default=5.0, gt=0)
    """Seconds between two repack plans, in addition to one after each new version."""
    by_speed: Annotated[bool, INCIDENTAL] = True
    """Place work by the measured speed of each rollout: on unlike machines fast ones get the long
    answers, and requests move to fast ones only. False treats all rollouts as equally fast.
    """
    placement: Annotated[Literal["ranks", "lengths", "room"], INCIDENTAL] = "ranks"
    """What places new samples. `ranks`: expected lengths, and under `keep_version` ranking groups.
    `lengths`: expected lengths alone, the longest first. `room`: no lengths, where most is free
    (docs/explanation/scheduling.md).
    """
    fill_tails: Annotated[bool, INCIDENTAL] = False
    """Under `keep_version`: a rollout that waits for its last long answers starts short ones beside
    them, which end earlier, so that its batch stays full. These are of an older version (at most 4
    behind when they start). Needs expected lengths (`placement` other than `room`).
    """
    rollouts_per_rank: Annotated[int, INCIDENTAL] = Field(default=2, ge=1)
    """Rollouts for each ranking group of a wave (`placement = "ranks"`). With 1 every rollout gets
    a range of lengths of its own, which gathers long answers most.
    """
    load_bytes_per_s: Annotated[float, INCIDENTAL] = Field(default=2e8, gt=0)
    """Assumed speed at which a rollout loads a version from the store. It decides whether a version
    that no rollout holds is loaded to resume its trajectories, or these restart on the newest.
    """
    group_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds from admission until a group is closed, with the completions it has by then."""
    lease_s: Annotated[float, INCIDENTAL] = Field(default=10.0, gt=0)
    """Duration of dispatch's lease in seconds; after a crash a standby waits this long. A restart
    by the same supervisor does not wait.
    """
    standby: Annotated[bool, INCIDENTAL] = False
    """`run` starts a second dispatch, which takes over the lease when the first loses it."""
    keep_s: Annotated[float, INCIDENTAL] = Field(default=5.0, gt=0)
    """Seconds between two saves of dispatch's state: a successor reads the log from the last one
    on.
    """


class TrainerSettings(ObjectiveSettings):
    """A training step: choice of groups, loss, update, publication."""

    steps: int = Field(default=60, ge=1)
    """Number of steps (versions) to train; the run ends after the last."""
    learner: Literal["torch", "paced"] = "torch"
    """`torch` trains a model; `paced` only models the time that training takes
    (docs/explanation/paced-engine.md).
    """
    groups_per_step: int = Field(default=24, ge=1)
    """B: groups that one step trains (a wave)."""
    samples_per_group: Annotated[int, PROMPTED] = Field(default=8, ge=1)
    """Trajectories per prompt."""
    survivors_min: Annotated[int, TAKEN] = Field(default=2, ge=1)
    """A group with fewer live trajectories is closed as dead."""
    updates_per_step: Annotated[int, FIXED] = Field(default=1, ge=1)
    """Optimiser updates per published version; the step's groups are divided among them."""
    epochs: Annotated[int, FIXED] = Field(default=1, ge=1, le=64)
    """How often a step trains its groups: each further epoch repeats the step's updates on the same
    micro-batches. Each repetition is in the ledger.
    """
    choose: str = "oldest"
    """Which complete groups are trained first: `oldest`, `freshest`, or `module:function`."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most padded tokens of one forward and backward pass."""
    workers: Annotated[int, INCIDENTAL] = Field(default=2, ge=1)
    """Threads that train micro-batches in parallel; gradients are always added in micro-batch
    order.
    """
    threads: Annotated[int, INCIDENTAL] = Field(default=1, ge=1)
    """Torch threads per worker; divided among the `processes`."""
    processes: Annotated[int, INCIDENTAL] = Field(default=1, ge=1, le=64)
    """Processes of this machine that train one model together, each with a slice of it
    (docs/how-to/several-gpus.md); with `device = "cuda"` each uses a GPU of its own.
    """
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of forward and backward passes; masters, their update and the head stay float32."""
    gradient_checkpointing: Annotated[bool, INCIDENTAL] = False
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    compile: Annotated[bool, INCIDENTAL] = False
    """Compile the decoder layers (torch.compile). It needs a C++ compiler, on a GPU Triton. After a
    restart a repeated step may be rounded differently.
    """
    varlen_attention: Annotated[bool, INCIDENTAL] = False
    """Join the sequences of a micro-batch in one row without padding, and attend within each by its
    length instead of by a mask over the row (docs/explanation/learning.md).
    """
    cpu_offload: Annotated[bool, INCIDENTAL] = False
    """Keep masters, moments and the sum of gradients in host memory and update them there; a GPU
    then holds the weights in the type `compute`, the activations, and one pass's gradients.
    """
    device: Annotated[str, INCIDENTAL] = Field(default="cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$")
    """Device of the learner: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA if available)."""
    optimiser: Annotated[Literal["adamw", "muon", "adamw_8bit"], FIXED] = "adamw"
    """`adamw`; `muon` for the matrices of hidden layers and AdamW for embeddings, head, norms and
    biases; `adamw_8bit`, whose moments have 8 bits (bitsandbytes, the extra `lowbit`)
    (docs/explanation/learning.md).
    """
    lr: float = Field(default=5e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's β₁ and β₂."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, decoupled from the gradient."""
    lr_ramp_steps: int = Field(default=5, ge=0)
    """Linear warm-up of the learning rate, in updates."""
    lr_final: float = Field(default=0.2, ge=0, le=1)
    """Learning rate at the last step as a share of the peak; the decay is linear."""
    gradient_norm_max: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    annotations: tuple[str, ...] = Field(default=(), max_length=16)
    """Annotations that a sample must have besides those in `reward_terms` before it is trained."""
    reward_terms: dict[str, float] = Field(
        default_factory=lambda: {"reward": 1.0}, min_length=1, max_length=16
    )
    """The reward is the sum of these annotations, each times its weight; `reward` is the sample's
    own reward where its rollout computed one.
    """
    process_rewards: bool = False
    """Annotations of `reward_terms` may have a value for each turn or for each generated token; the
    advantage of a token then counts the rewards from it on (docs/how-to/late-rewards.md).
    """
    filter_equal_rewards: Annotated[bool, TAKEN] = False
    """Close groups whose rewards are all equal as filtered: their advantages are all 0."""
    lease_s: Annotated[float, INCIDENTAL] = Field(default=10.0, gt=0)
    """Duration of the trainer's lease in seconds; after a crash a standby waits this long. A
    restart by the same supervisor does not wait.
    """
    ranks_timeout_s: Annotated[float, INCIDENTAL] = Field(default=600.0, gt=0)
    """Longest wait of one of several trainer processes for another, in seconds
    (docs/how-to/several-gpus.md).
    """

    @property
    def updates_in_step(self) -> int:
        """Returns the number of optimiser updates of a step, those of all epochs."""
        return self.updates_per_step * self.epochs


class ArchiveSettings(Settings):
    """Archive of the log as Parquet files in the store, for analysis and replay."""

    enabled: bool = True
    """Run the archive role with the run."""
    roll_bytes: int = Field(default=256 << 20, ge=1)
    """Most pending record bytes of a topic; then the fullest partition's file is written."""
    roll_s: float = Field(default=300.0, gt=0)
    """Seconds after which a partition's pending records are written, however few they are."""
    compact_bytes: int = Field(default=128 << 20, ge=0)
    """Most bytes of a merged file: small files of a day are merged up to it. 0: none are merged."""
    compact_grace_s: float = Field(default=60.0, ge=0)
    """Seconds for which files stay beside the merged file that holds their rows."""
    topics: tuple[
        Literal["trajectories", "annotations", "ledger", "admissions", "applied"], ...
    ] = ("trajectories", "annotations", "ledger", "admissions", "applied")
    """The topics that are archived."""
