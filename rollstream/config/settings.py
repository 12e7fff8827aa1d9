"""The settings of a run: every role's settings as one frozen value. One docstring line per
field.
"""

from typing import Annotated, Literal

from pydantic import Field

from rollstream.consumers.settings import ArchiveSettings, DispatchSettings, TrainerSettings
from rollstream.producers.engines.paced.settings import PacedSettings
from rollstream.producers.settings import (
    EvaluationSettings,
    RolloutSettings,
    SamplingSettings,
    ScoringSettings,
    TaskSettings,
)
from rollstream.storage.settings import (
    FIXED,
    INCIDENTAL,
    CheckpointSettings,
    ModelSettings,
    RelaySettings,
    Settings,
    WeightsSettings,
)


class WarmupSettings(Settings):
    """Supervised warm-up of a model that starts from scratch."""

    enabled: bool = True
    """Make a model when `model.path` is not given and the run's folder has none."""
    threads: Annotated[int, INCIDENTAL] = Field(default=2, ge=1)
    """Torch threads; no other role runs at that time."""
    documents: int = Field(default=20_000, ge=1)
    """Documents drawn from the task."""
    steps: int = Field(default=800, ge=1)
    """Batches trained."""


class MetricsSettings(Settings):
    """Metrics and health checks that each process serves (docs/reference/metrics.md)."""

    enabled: bool = True
    """Serve `/metrics` and `/healthz`."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` where others scrape."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free port, written to `metrics/endpoints/<name>.json`; otherwise `run` listens here and
    its roles on the following ports, and a role that is started alone listens here.
    """
    stalled_s: float = Field(default=300.0, gt=0)
    """`/healthz` answers 503 when a role's loop has not turned for this many seconds."""


class DevicesSettings(Settings):
    """GPUs of this machine by role (docs/how-to/several-gpus.md). Positions count the GPUs that
    `rollstream run` sees, from 0. Without any of them every process sees all.
    """

    trainer: int | tuple[int, ...] | None = None
    """Number of the trainer's GPUs, or their positions; as many as `trainer.processes`."""
    rollouts: int | tuple[int, ...] | None = None
    """Number of the rollouts' GPUs, or their positions; engines take equal groups in turn."""
    evaluation: Literal["rollouts", "trainer"] = "rollouts"
    """The role whose first GPUs the evaluation uses too."""


class Configuration(Settings):
    """All settings of one run."""

    run: Annotated[str, FIXED] = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run."""
    seed: int = Field(default=0, ge=0)
    """Determines prompt order, sampling and warm-up."""
    folder: Annotated[str | None, INCIDENTAL] = None
    """The run's folder; default `runs/<run>`."""
    bus: Annotated[str, FIXED] = "sqlite:bus"
    """URL of the log; a relative path is inside the run's folder."""
    store: Annotated[str, FIXED] = "file:store"
    """URL of the object store; a relative path is inside the run's folder."""
    sync: Annotated[Literal["normal", "full"], INCIDENTAL] = "normal"
    """`full` survives power loss, at the cost of a disk flush per write."""
    truncate: Annotated[bool | None, INCIDENTAL] = None
    """Delete records of the log that are archived and that no role needs to resume; True: also
    without an archive; default: only with one.
    """
    model: Annotated[ModelSettings, FIXED] = ModelSettings()
    """The policy."""
    task: TaskSettings = TaskSettings()
    """Prompts and rewards."""
    sampling: SamplingSettings = SamplingSettings()
    """How training trajectories are sampled."""
    scoring: ScoringSettings = ScoringSettings()
    """Scorers of this machine."""
    devices: Annotated[DevicesSettings, INCIDENTAL] = DevicesSettings()
    """GPUs of this machine."""
    rollouts: Annotated[RolloutSettings, INCIDENTAL] = RolloutSettings()
    """Rollouts of this machine."""
    evaluation: Annotated[EvaluationSettings, INCIDENTAL] = EvaluationSettings()
    """Evaluation beside the run."""
    dispatch: DispatchSettings = DispatchSettings()
    """Admission, placement, recovery."""
    trainer: TrainerSettings = TrainerSettings()
    """Steps, loss, optimiser."""
    paced: PacedSettings = PacedSettings()
    """The stand-in for model and accelerators under the engine `paced`."""
    weights: WeightsSettings = WeightsSettings()
    """Published versions."""
    relay: Annotated[RelaySettings, INCIDENTAL] = RelaySettings()
    """This node's cache of versions."""
    checkpoints: Annotated[CheckpointSettings, INCIDENTAL] = CheckpointSettings()
    """The trainer's state."""
    warmup: WarmupSettings = WarmupSettings()
    """Supervised training before the first step."""
    archive: Annotated[ArchiveSettings, INCIDENTAL] = ArchiveSettings()
    """The log as Parquet files."""
    metrics: Annotated[MetricsSettings, INCIDENTAL] = MetricsSettings()
    """Metrics of every process while it runs."""
