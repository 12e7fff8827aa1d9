"""Computes a `RunSnapshot`, the metrics of one moment, as a pure function of state, settings and
time. The view draws the snapshot; the warnings are functions of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollstream.config.settings import Configuration
from rollstream.monitor.groups import GroupTracker, oldest
from rollstream.monitor.progress import (
    LagSummary,
    RunPace,
    lag_summary,
    recent_steps,
    run_pace,
    standing_of,
)
from rollstream.monitor.rollouts import (
    RolloutSnapshot,
    SchedulingMetrics,
    TaskMismatch,
    mismatch_by_task,
    rollout_snapshots,
    scheduling_metrics,
)
from rollstream.monitor.samples import PassDrafts, RecentSamples, TaskRewards, passes_newest_first
from rollstream.monitor.state import DeadLetters, RunState
from rollstream.streams.admissible import REFUSAL_KINDS, REFUSED_ANNOTATIONS
from rollstream.streams.records import StepDone
from rollstream.supervisor.supervisor import RoleState


@dataclass(frozen=True, slots=True)
class RunWarning:
    """Warns of one problem: `what` describes it, `do` is the advice, and `kind` names it, with one
    value as long as the problem lasts.
    """

    kind: str
    what: str
    do: str


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Holds the settings that the monitor needs and the log lacks, each under its own name."""

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
    """True if lengths and times are drawn or computed, and no model runs."""
    is_float32: bool = False
    """True if engine, trainer and published weights all use float32 and differ only by rounding."""

    def groups_max(self) -> int:
        """Returns the largest number of open groups that `max_lag` permits (invariant 5)."""
        if self.max_lag is None:
            return self.ready_groups_max
        return (self.max_lag + 1) * self.groups_per_step

    def state(self) -> RunState:
        """Returns an empty state; a sample is ready in it with this run's required annotations."""
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


REASONS_MAX = 4
TASK_REWARD_PREFIX = "reward_mean/"  # metrics of a step by task


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """Counts waiting groups and prompts. Each field in seconds is the time that the oldest of its
    kind has waited, None if none waits.
    """

    open_groups: int
    ready_groups: int
    unread_prompts: int
    open_group_s: float | None
    ready_group_s: float | None
    unscored_group_s: float | None
    """Waiting time of the oldest group that lacks only annotations."""
    unread_prompt_s: float | None


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Counts groups by ending and the last trajectories by finish, together with the `late` and
    `duplicate` ones since the view started. `dead_reasons` are the most frequent ones.
    """

    groups: Mapping[str, int]
    is_tail: bool
    """True if the run's first groups are not included."""
    trajectories: Mapping[str, int]
    dead_reasons: tuple[tuple[str, int], ...]
    annotations: int
    annotations_late: int


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """Describes a process that ended unexpectedly; `code` −9 means signal 9."""

    role: str
    code: int
    ago_s: float


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Holds everything that the view shows; unknown values are None or absent. `record_ages` maps
    each topic to the seconds since its newest record, `unarchived_s` to the number of its records
    that are not archived and the age of the oldest.
    """

    title: str
    plan: RunSettings
    seconds: float
    phase: str
    is_over: bool
    is_quiet: bool
    """True if no record is written although the run is not over."""
    is_starting: bool
    """True if a process started so recently that it may not have written a record yet."""
    step: int
    steps: int
    pace: RunPace
    lag: LagSummary
    metrics: Mapping[str, float]
    rewards: tuple[float, ...]
    task_rewards: Mapping[str, float]
    tasks: Mapping[str, TaskRewards]
    mismatch: Mapping[str, TaskMismatch]
    skipped: int
    """The number of kept steps with an update that was skipped because it was not finite."""
    refused: Mapping[str, int]
    """Trajectories that the kept steps could not train, by kind (`streams/admissible.py`)."""
    foreign: Mapping[str, int]
    """Other readable records that trainer and dispatch refused, by topic."""
    drafts: tuple[PassDrafts, ...]
    """Draft totals of the last trajectories; empty without drafting."""
    evaluation: Mapping[str, float] | None
    version: int | None
    version_bytes: int
    queue: GroupQueue
    record_ages: Mapping[str, float]
    outcomes: OutcomeCounts
    rollouts: tuple[RolloutSnapshot, ...]
    scheduling: SchedulingMetrics
    dead_letters: Mapping[str, DeadLetters]
    unarchived_s: Mapping[str, tuple[int, float]]
    holes: tuple[str, ...]
    restarts: int
    restarted: Mapping[str, int]
    """Restarts by role; `restarts` is their sum."""
    deaths: tuple[ProcessDeath, ...]
    notes: tuple[str, ...]
    trouble: str = ""
    """The error because of which the metrics could not be refreshed; "" if they were."""
    concerns: tuple[RunWarning, ...] = ()


def take_snapshot(
    state: RunState,
    plan: RunSettings,
    now_s: float,
    roles: Sequence[RoleState] = (),
    started_s: float | None = None,
) -> RunSnapshot:
    """Returns the metrics at `now_s`, in seconds since the epoch like the records' times.

    For a run that is over, ages and rates are those at its end.
    """
    last = state.steps[-1] if state.steps else None
    recent = recent_steps(state.steps)
    now = standing_of(state, plan.steps, now_s)
    remaining = 0 if now.is_over or now.is_quiet else plan.steps - now.step
    at_s = min(now_s, now.newest_s or now_s) if now.is_over else now_s
    lines = rollout_snapshots(state, at_s)
    tasks = state.samples.tasks(plan.samples_per_group)
    return RunSnapshot(
        title=f"{plan.run} · seed {plan.seed}{' · paced' if plan.is_paced else ''}",
        plan=plan,
        seconds=_age(state.began_s if started_s is None else started_s, at_s) or 0.0,
        phase=now.phase,
        is_over=now.is_over,
        is_quiet=now.is_quiet,
        is_starting=now.is_starting,
        step=now.step,
        steps=plan.steps,
        pace=run_pace(state, recent, lines, remaining, at_s, now.is_over),
        lag=lag_summary(state, recent, plan.max_lag),
        metrics=last.metrics if last else {},
        rewards=tuple(done.metrics.get("reward_mean", 0.0) for done in state.steps),
        task_rewards=_by_task(recent) or _means(tasks),
        tasks=tasks,
        mismatch=mismatch_by_task(state.steps),
        skipped=sum(done.metrics.get("updates_skipped", 0.0) > 0 for done in state.steps),
        refused=_refused(state.steps),
        foreign=_foreign(state),
        drafts=passes_newest_first(state.samples.drafts(state.epochs)),
        evaluation=state.evaluations[-1] if state.evaluations else None,
        version=state.weights.version.number if state.weights else None,
        version_bytes=state.weights.bytes if state.weights else 0,
        queue=_queue(state, at_s),
        record_ages={t: max(0.0, now_s - one) for t, one in sorted(state.newest_s.items())},
        outcomes=_outcomes(state),
        rollouts=lines,
        scheduling=scheduling_metrics(state, lines, at_s),
        dead_letters=state.dead_letters,
        holes=tuple(state.holes),
        unarchived_s={
            topic: (left.records, max(0.0, at_s - left.oldest_s))
            for topic, left in state.unarchived.items()
        },
        restarts=sum(state.restarts().values()),
        restarted=state.restarts(),
        deaths=_deaths(state, now_s),
        notes=tuple(f"{role.name} {role.note}" for role in roles if role.note),
    )


def _by_task(recent: Sequence[StepDone]) -> dict[str, float]:
    """Returns the mean reward of each task over the last steps that trained it."""
    found: dict[str, list[float]] = {}
    for done in recent:
        for name, value in done.metrics.items():
            if name.startswith(TASK_REWARD_PREFIX):
                found.setdefault(name.removeprefix(TASK_REWARD_PREFIX), []).append(value)
    return {task: fmean(values) for task, values in sorted(found.items())}


def _means(tasks: Mapping[str, TaskRewards]) -> dict[str, float]:
    """Returns the mean rewards of the last trajectories, for a run whose trainer records none by
    task; nothing for a run of one task.
    """
    return {task: found.reward_mean for task, found in tasks.items()} if len(tasks) > 1 else {}


def _queue(state: RunState, at_s: float) -> GroupQueue:
    groups = state.groups.open.values()
    unscored = (group.finished_s for group in groups if group.ready_s is None)
    return GroupQueue(
        open_groups=state.groups.outcomes()["open"],
        ready_groups=state.groups.ready(),
        unread_prompts=len(state.prompts),
        open_group_s=_age(oldest(group.admitted_s for group in groups), at_s),
        ready_group_s=_age(oldest(group.ready_s for group in groups), at_s),
        unscored_group_s=_age(oldest(unscored), at_s),
        unread_prompt_s=_age(oldest(state.prompts.values()), at_s),
    )


def _outcomes(state: RunState) -> OutcomeCounts:
    groups = state.groups
    seen = {"late": groups.late, "duplicate": groups.duplicate}
    return OutcomeCounts(
        groups=dict(groups.endings),
        is_tail=state.is_tail,
        trajectories={**state.samples.finishes(), **seen},
        dead_reasons=tuple(state.samples.reasons()[:REASONS_MAX]),
        annotations=groups.annotations,
        annotations_late=groups.late_annotations,
    )


def _age(time_s: float | None, at_s: float) -> float | None:
    return None if time_s is None else max(0.0, at_s - time_s)


def _deaths(state: RunState, now_s: float) -> tuple[ProcessDeath, ...]:
    """Returns the deaths that the supervisor recorded, the newest first."""
    return tuple(
        ProcessDeath(str(one.get("role")), int(one.get("code", 0)), max(0.0, now_s - one["time_s"]))
        for one in reversed(state.events)
        if one.get("event") == "death"
    )


def _foreign(state: RunState) -> dict[str, int]:
    notes = sum(done.counts.get(REFUSED_ANNOTATIONS, 0) for done in state.steps)
    return {topic: n for topic, n in {**state.foreign, "annotations": notes}.items() if n}


def _refused(steps: Sequence[StepDone]) -> dict[str, int]:
    counts = {
        kind: sum(done.counts.get(f"refused_{kind}", 0) for done in steps) for kind in REFUSAL_KINDS
    }
    return {kind: count for kind, count in counts.items() if count}
