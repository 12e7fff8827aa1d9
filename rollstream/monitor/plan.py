"""The settings of a run that the monitor needs and that its log does not contain."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.config.settings import Configuration
from rollstream.monitor.groups import GroupTracker
from rollstream.monitor.samples import RecentSamples
from rollstream.monitor.state import RunState


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Fields are named after their settings."""

    run: str
    seed: int
    steps: int
    groups_per_step: int
    samples_per_group: int
    max_lag: int | None
    ready_groups_max: int
    heartbeat_timeout_s: float
    group_deadline_s: float
    tokens_max: int
    archive_roll_s: float
    annotations: tuple[str, ...]
    reward_terms: Mapping[str, float]
    is_paced: bool = False
    """Lengths and times are drawn or computed; no model runs."""
    is_float32: bool = False
    """Engine, trainer and published weights all use float32: they differ only by rounding."""

    def groups_max(self) -> int:
        """Returns the largest number of open groups that `max_lag` permits (invariant 5)."""
        if self.max_lag is None:
            return self.ready_groups_max
        return (self.max_lag + 1) * self.groups_per_step

    def state(self) -> RunState:
        """Returns an empty state that requires this run's annotations of a sample."""
        names = frozenset(self.annotations) | frozenset(self.reward_terms)
        return RunState(groups=GroupTracker(names), samples=RecentSamples(self.reward_terms))


def run_settings_of(c: Configuration) -> RunSettings:
    return RunSettings(
        run=c.run,
        seed=c.seed,
        steps=c.trainer.steps,
        groups_per_step=c.trainer.groups_per_step,
        samples_per_group=c.trainer.samples_per_group,
        max_lag=c.dispatch.max_lag,
        ready_groups_max=c.dispatch.ready_groups_max,
        heartbeat_timeout_s=c.dispatch.heartbeat_timeout_s,
        group_deadline_s=c.dispatch.group_deadline_s,
        tokens_max=c.sampling.tokens_max,
        archive_roll_s=c.archive.roll_s,
        annotations=c.trainer.annotations,
        reward_terms=c.trainer.reward_terms,
        is_paced=c.rollouts.engine == "paced",
        is_float32=_is_float32(c),
    )


def _is_float32(c: Configuration) -> bool:
    """True if all dtypes are set to float32; with `dtype = "auto"` vLLM chooses by device."""
    engine = "float32" if c.rollouts.engine == "torch" else c.rollouts.vllm.dtype
    return engine == c.weights.dtype == c.trainer.compute == "float32"
