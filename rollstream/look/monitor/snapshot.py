"""Everything that the live views show of a run at one moment, as a pure function of the run's
state, the settings that the log lacks, and the time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollstream.look.monitor import progress
from rollstream.look.monitor.groups import GroupTracker, oldest
from rollstream.look.monitor.machine_use import MachineUse
from rollstream.look.monitor.rollouts import (
    RolloutSnapshot,
    SchedulingMetrics,
    TaskMismatch,
    mismatch_by_task,
    rollout_snapshots,
    scheduling_metrics,
)
from rollstream.look.monitor.samples import (
    SAMPLES_KEPT,
    PassDrafts,
    RecentSamples,
    TaskRewards,
    passes_newest_first,
)
from rollstream.look.monitor.state import DeadLetters, RunState
from rollstream.run.config.settings import Configuration
from rollstream.run.supervisor.supervisor import RoleState
from rollstream.storage.skipped_rows import SkippedRecord
from rollstream.streams.admissible import REFUSAL_KINDS, REFUSED_ANNOTATIONS
from rollstream.streams.records import StepDone


@dataclass(frozen=True, slots=True)
class RunWarning:
    """`what` describes the problem, with present numbers, and `do` is the advice. `kind` stays the
    same in all snapshots in which it lasts.
    """

    kind: str
    what: str
    do: str


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that the log lacks; most fields have the name of their setting."""

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
    """Lengths are drawn, times are computed, and no model runs."""
    has_agents: bool = False
    """Programs ask for turns; they may limit their tokens, too."""
    is_float32: bool = False
    """Engine, trainer and published weights all use float32 and differ only by rounding."""
    trainer_threads: int = 1
    """The trainer's computing time is a sum over them."""
    trainer_gpus: int | None = None
    rollout_gpus: int = 1
    rollout_cores: int | None = None
    """Of one rollout; None if it decodes on GPUs, or computes nothing."""
    is_evaluated: bool = True
    is_one_machine: bool = False
    """A `sqlite:` log has no other form."""

    def groups_max(self) -> int:
        """Returns open groups that `max_lag` permits (invariant 5)."""
        if self.max_lag is None:
            return self.ready_groups_max
        return (self.max_lag + 1) * self.groups_per_step

    def judged_trajectories(self) -> int:
        """The last ones, over which dead and cut ones are counted."""
        # Those of ten steps, so that a mended cause soon disappears; and enough that one in a
        # hundred is more than one.
        steps = progress.RATE_STEPS * self.groups_per_step * self.samples_per_group
        return max(JUDGED_MIN, min(SAMPLES_KEPT, steps))

    def state(self) -> RunState:
        """Empty; a sample is ready for training once all annotations have arrived that this run
        requires.
        """
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
        is_paced=not c.has_model,
        has_agents=c.agent.is_active,
        is_float32=_is_float32(c),
        is_evaluated=c.evaluation.enabled,
        trainer_threads=c.trainer_threads,
        trainer_gpus=_trainer_gpus(c),
        rollout_gpus=c.rollouts.kind.cards(c.rollouts),
        rollout_cores=c.rollouts.threads if _decodes_on_cores(c) else None,
        is_one_machine=c.bus.startswith("sqlite:"),
    )


def _trainer_gpus(c: Configuration) -> int | None:
    is_on_gpus = c.has_model and c.trainer.device != "cpu"
    return c.trainer.processes if is_on_gpus else None


def _decodes_on_cores(c: Configuration) -> bool:
    return "cpu" in c.rollouts.kind.computes_on(c.rollouts) and not c.devices.rollouts


def _is_float32(c: Configuration) -> bool:
    # An engine that chooses its type by the device is not float32 here.
    engine = c.rollouts.kind.dtype(c.rollouts)
    return engine == c.weights.dtype == c.trainer.compute == "float32"


# Trajectories: one in a hundred is two to three.
JUDGED_MIN = 256
# Reasons of dead trajectories that a snapshot lists.
REASONS_MAX = 4
# Of a step's metric with the mean reward of one task.
TASK_REWARD_PREFIX = "reward_mean/"


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """Open groups, those that are ready for training, and prompts that are not admitted yet. A
    field in seconds is the longest wait of its kind; None if none waits.
    """

    open_groups: int
    ready_groups: int
    unread_prompts: int
    open_group_s: float | None
    ready_group_s: float | None
    unscored_group_s: float | None
    """All its trajectories finished and it lacks annotations."""
    unread_prompt_s: float | None


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Groups by ending, and annotations with those after the end of their group. `trajectories`
    counts the last ones (`RunSettings.judged_trajectories`) by `finish`, and of all records read
    those that were `late` or `duplicate`.
    """

    groups: Mapping[str, int]
    is_tail: bool
    """Only the tail of the log was read, without the run's first groups."""
    trajectories: Mapping[str, int]
    dead_reasons: tuple[tuple[str, int], ...]
    annotations: int
    annotations_late: int
    dead_tasks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Unknown values are None or absent. The kept steps and the last trajectories are those that
    the state still holds: 240 and 2048 at most.
    """

    title: str
    plan: RunSettings
    elapsed_s: float
    """Since the run's start, else its first record, without pauses between sessions."""
    phase: str
    is_over: bool
    has_failed: bool
    """The supervisor gave up."""
    is_quiet: bool
    """No record is written although the run is not over."""
    is_starting: bool
    """A process may not have written its first record yet."""
    step: int
    steps: int
    pace: progress.RunPace
    lag: progress.LagSummary
    metrics: Mapping[str, float]
    rewards: tuple[float, ...]
    """Of each kept step, oldest first."""
    task_rewards: Mapping[str, float]
    """Over the last steps, or over the last complete groups if the trainer records none by task."""
    tasks: Mapping[str, TaskRewards]
    mismatch: Mapping[str, TaskMismatch]
    skipped: int
    """Kept steps with a skipped update: no token to train, or a gradient that was not finite."""
    refused: Mapping[str, int]
    """By the trainer in the kept steps, by the kinds of `admissible.py`."""
    skipped_rows: tuple[SkippedRecord, ...]
    foreign: Mapping[str, int]
    """Other readable records that were refused (invariant 12), by topic: annotations by the
    trainer, partials, statuses and applied versions by dispatch.
    """
    drafts: tuple[PassDrafts, ...]
    evaluation: Mapping[str, float] | None
    version: int | None
    version_bytes: int
    queue: GroupQueue
    record_ages: Mapping[str, float]
    """Of the newest record of each topic, in seconds."""
    outcomes: OutcomeCounts
    rollouts: tuple[RolloutSnapshot, ...]
    scheduling: SchedulingMetrics
    dead_letters: Mapping[str, DeadLetters]
    unarchived_s: Mapping[str, tuple[int, float]]
    """Records that are not archived yet by topic, and the age of the oldest."""
    holes: tuple[str, ...]
    restarts: int
    restarted: Mapping[str, int]
    restart_ages: Mapping[str, tuple[float, ...]]
    """Seconds since each of a role's last restarts that its terms show."""
    deaths: tuple[progress.ProcessDeath, ...]
    notes: tuple[str, ...]
    trainer_age_s: float | None = None
    machine: MachineUse | None = None
    """Of the whole run; None if unknown, as on a cluster."""
    trouble: str = ""
    """Because of which the state could not be refreshed, else "". `observer.py` adds it and
    `concerns` (the warnings, most urgent first).
    """
    concerns: tuple[RunWarning, ...] = ()


def take_snapshot(
    state: RunState,
    plan: RunSettings,
    now_s: float,
    roles: Sequence[RoleState] = (),
    started_s: float | None = None,
) -> RunSnapshot:
    """Takes the snapshot at `now_s` (seconds since the epoch). A caller that runs the processes
    passes their states (`roles`) and the time at which it started the run.
    """
    last = state.steps[-1] if state.steps else None
    recent = progress.recent_steps(state.steps)
    now = progress.standing_of(state, plan.steps, now_s, plan.is_evaluated)
    remaining = 0 if now.is_over or now.is_quiet else plan.steps - now.step
    # Of a run that is over, rates and waits are those at its newest record; only `record_ages` and
    # `deaths` count to `now_s`.
    at_s = min(now_s, now.newest_s or now_s) if now.is_over else now_s
    lines = rollout_snapshots(state, at_s)
    tasks = state.samples.tasks(plan.samples_per_group)
    return RunSnapshot(
        title=f"{plan.run} · seed {plan.seed}{' · paced' if plan.is_paced else ''}",
        plan=plan,
        elapsed_s=_run_seconds(state, now_s, at_s, started_s),
        phase=now.phase,
        is_over=now.is_over,
        has_failed=now.state == "failed",
        is_quiet=now.is_quiet,
        is_starting=now.is_starting,
        step=now.step,
        steps=plan.steps,
        pace=progress.run_pace(state, recent, lines, remaining, at_s, now.is_over),
        lag=progress.lag_summary(state, recent, plan.max_lag),
        metrics=last.metrics if last else {},
        rewards=tuple(done.metrics.get("reward_mean", 0.0) for done in state.steps),
        task_rewards=_by_task(recent) or _means(tasks),
        tasks=tasks,
        mismatch=mismatch_by_task(state.steps),
        skipped=sum(done.metrics.get("updates_skipped", 0.0) > 0 for done in state.steps),
        refused=_refused(state.steps),
        skipped_rows=state.skipped_rows,
        foreign=_foreign(state),
        drafts=passes_newest_first(state.samples.drafts(state.epochs)),
        evaluation=state.evaluations[-1] if state.evaluations else None,
        version=state.weights.version.number if state.weights else None,
        version_bytes=state.weights.bytes if state.weights else 0,
        queue=_queue(state, at_s),
        record_ages={t: max(0.0, now_s - time_s) for t, time_s in sorted(state.newest_s.items())},
        outcomes=_outcomes(state, plan.judged_trajectories()),
        rollouts=lines,
        scheduling=scheduling_metrics(state, lines, at_s),
        dead_letters=state.dead_letters,
        holes=tuple(state.holes),
        unarchived_s=_unarchived(state, at_s),
        restarts=sum(state.restarts().values()),
        restarted=state.restarts(),
        restart_ages=progress.restart_ages(state, now_s),
        deaths=progress.recorded_deaths(state, now_s),
        trainer_age_s=progress.start_age_s(state, "trainer", now_s),
        notes=tuple(f"{role.name} {role.note}" for role in roles if role.note),
    )


def _run_seconds(state: RunState, now_s: float, at_s: float, started_s: float | None) -> float:
    begins = [at for at in (state.sessions.begin_s, started_s) if at is not None]
    begin_s = min(begins, default=state.began_s)
    if begin_s is None:
        return 0.0
    # An ending that the supervisor recorded ends this time, until a session of the caller's begins;
    # without one it ends at `at_s`.
    return state.run_s(begin_s, at_s if state.sessions.ended_s is None else now_s, started_s)


def _unarchived(state: RunState, at_s: float) -> dict[str, tuple[int, float]]:
    return {
        topic: (backlog.records, max(0.0, at_s - backlog.oldest_s))
        for topic, backlog in state.unarchived.items()
    }


def _by_task(recent: Sequence[StepDone]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for done in recent:
        for name, value in done.metrics.items():
            if name.startswith(TASK_REWARD_PREFIX):
                rewards.setdefault(name.removeprefix(TASK_REWARD_PREFIX), []).append(value)
    return {task: fmean(values) for task, values in sorted(rewards.items())}


def _means(tasks: Mapping[str, TaskRewards]) -> dict[str, float]:
    # For a run whose trainer records no rewards by task; empty for a run of one task.
    return {task: rewards.reward_mean for task, rewards in tasks.items()} if len(tasks) > 1 else {}


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


def _outcomes(state: RunState, judged: int) -> OutcomeCounts:
    groups = state.groups
    seen = {"late": groups.late, "duplicate": groups.duplicate}
    return OutcomeCounts(
        groups=dict(groups.endings),
        is_tail=state.is_tail,
        trajectories={**state.samples.finishes(judged), **seen},
        dead_reasons=tuple(state.samples.reasons(judged)[:REASONS_MAX]),
        annotations=groups.annotations,
        annotations_late=groups.late_annotations,
        dead_tasks=tuple(state.samples.dead_tasks(judged)[:REASONS_MAX]),
    )


def _age(time_s: float | None, at_s: float) -> float | None:
    return None if time_s is None else max(0.0, at_s - time_s)


def _foreign(state: RunState) -> dict[str, int]:
    notes = sum(done.counts.get(REFUSED_ANNOTATIONS, 0) for done in state.steps)
    return {topic: n for topic, n in {**state.foreign, "annotations": notes}.items() if n}


def _refused(steps: Sequence[StepDone]) -> dict[str, int]:
    counts = {
        kind: sum(done.counts.get(f"refused_{kind}", 0) for done in steps) for kind in REFUSAL_KINDS
    }
    return {kind: count for kind, count in counts.items() if count}
