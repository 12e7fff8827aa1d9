"""The metrics of one moment: a pure function of state and time; input of view and warnings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollstream.monitor.drafts import PassDrafts, passes_newest_first
from rollstream.monitor.groups import oldest
from rollstream.monitor.scheduling import TaskMismatch, mismatch_by_task
from rollstream.monitor.progress import LagSummary, RunPace, lag_summary, run_pace, recent_steps
from rollstream.monitor.phase import is_over, is_quiet, is_starting, phase_of
from rollstream.monitor.plan import RunSettings
from rollstream.monitor.rollouts import RolloutSnapshot, rollout_snapshots
from rollstream.monitor.samples import TaskRewards
from rollstream.monitor.scheduling_part import SchedulingMetrics, scheduling_metrics
from rollstream.monitor.state import DeadLetters, RunState, ArchiveBacklog
from rollstream.supervisor.supervisor import RoleState
from rollstream.monitor.concern import RunWarning
from rollstream.streams.admissible import REFUSAL_KINDS
from rollstream.streams.records import StepDone

REASONS_MAX = 4
TASK_REWARD_PREFIX = "reward_mean/"  # metrics of a step by task


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """Waiting groups and prompts, and the seconds that the oldest has waited; None without any."""

    open_groups: int
    ready_groups: int
    unread_prompts: int
    open_group_s: float | None
    ready_group_s: float | None
    unscored_group_s: float | None
    """Age of the oldest group that lacks only annotations."""
    unread_prompt_s: float | None


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Groups by ending; the last trajectories by finish, with `late` and `duplicate` counted since
    the view started; the most frequent reasons of dead trajectories.
    """

    groups: Mapping[str, int]
    is_tail: bool
    """The run's first groups are not included."""
    trajectories: Mapping[str, int]
    dead_reasons: tuple[tuple[str, int], ...]
    annotations: int
    annotations_late: int


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """A process that ended unexpectedly; `code` −9 means signal 9."""

    role: str
    code: int
    ago_s: float


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Everything that the view shows; unknown values are None or absent. `record_ages` maps each
    topic to the seconds since its newest record.
    """

    title: str
    plan: RunSettings
    seconds: float
    phase: str
    is_over: bool
    is_quiet: bool
    """No record is written although the run is not over."""
    is_starting: bool
    """A process started so recently that it may not have written a record yet."""
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
    """Kept steps with an update that was skipped because it was not finite."""
    refused: Mapping[str, int]
    """Trajectories that the kept steps could not train, by kind (`streams/admissible.py`)."""
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
    restarts: int
    deaths: tuple[ProcessDeath, ...]
    notes: tuple[str, ...]
    trouble: str = ""
    """Why the metrics could not be refreshed; "" if they were."""
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
    step = last.step if last else 0
    newest_s = max(state.newest_s.values(), default=now_s)
    phase, over = phase_of(state, step, plan.steps, now_s), is_over(state, step, plan.steps, now_s)
    quiet = not over and is_quiet(state, now_s)
    remaining = 0 if over or quiet else plan.steps - step
    at_s = min(now_s, newest_s) if over else now_s
    lines = rollout_snapshots(state, at_s)
    tasks = state.samples.tasks(plan.samples_per_group)
    return RunSnapshot(
        title=f"{plan.run} · seed {plan.seed}{' · paced' if plan.is_paced else ''}",
        plan=plan,
        seconds=_seconds(state.began_s if started_s is None else started_s, at_s),
        phase=phase,
        is_over=over,
        is_quiet=quiet,
        is_starting=is_starting(state, now_s),
        step=step,
        steps=plan.steps,
        pace=run_pace(state, recent, lines, remaining, at_s, over),
        lag=lag_summary(state, recent, plan.max_lag),
        metrics=last.metrics if last else {},
        rewards=tuple(done.metrics.get("reward_mean", 0.0) for done in state.steps),
        task_rewards=_by_task(recent) or _means(tasks),
        tasks=tasks,
        mismatch=mismatch_by_task(state.steps),
        skipped=sum(done.metrics.get("updates_skipped", 0.0) > 0 for done in state.steps),
        refused=_refused(state.steps),
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
        unarchived_s={t: _backlog(one, at_s) for t, one in state.unarchived.items()},
        restarts=state.deaths,
        deaths=_deaths(state, now_s),
        notes=tuple(f"{role.name} {role.note}" for role in roles if role.note),
    )


def _seconds(began_s: float | None, at_s: float) -> float:
    return 0.0 if began_s is None else max(0.0, at_s - began_s)


def _by_task(recent: Sequence[StepDone]) -> dict[str, float]:
    """Mean reward of each task over the last steps that trained it."""
    found: dict[str, list[float]] = {}
    for done in recent:
        for name, value in done.metrics.items():
            if name.startswith(TASK_REWARD_PREFIX):
                found.setdefault(name.removeprefix(TASK_REWARD_PREFIX), []).append(value)
    return {task: fmean(values) for task, values in sorted(found.items())}


def _means(tasks: Mapping[str, TaskRewards]) -> dict[str, float]:
    """Mean rewards of the last trajectories, used if the trainer records none by task."""
    return {task: one.reward_mean for task, one in tasks.items()} if len(tasks) > 1 else {}


def _queue(state: RunState, at_s: float) -> GroupQueue:
    groups = state.groups.open.values()
    unscored = (group.finished_s for group in groups if group.ready_s is None)
    return GroupQueue(
        open_groups=len(groups),
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


def _backlog(left: ArchiveBacklog, at_s: float) -> tuple[int, float]:
    return left.records, max(0.0, at_s - left.oldest_s)


def _deaths(state: RunState, now_s: float) -> tuple[ProcessDeath, ...]:
    """Newest first."""
    return tuple(
        ProcessDeath(str(one.get("role")), int(one.get("code", 0)), max(0.0, now_s - one["time_s"]))
        for one in reversed(state.events)
        if one.get("event") == "death"
    )


def _refused(steps: Sequence[StepDone]) -> dict[str, int]:
    counts = {kind: sum(done.counts.get(f"refused_{kind}", 0) for done in steps) for kind in REFUSAL_KINDS}
    return {kind: count for kind, count in counts.items() if count}
