"""The figures of one moment, ready to draw: a pure function of state, roles and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rollstream.live.state import RunState
from rollstream.supervisor import RoleState
from streams.records import RolloutStatus, StepDone

SILENT_S = 5.0  # ten heartbeats
RATE_STEPS = 10  # speed and remaining time follow the last steps


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One rollout."""

    name: str
    running: int
    slots: int
    waiting: int
    version: int
    tokens_per_s: float
    idle_share: float
    state: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the live view shows; what is not known yet is None or absent."""

    title: str
    seconds: float
    phase: str
    step: int
    steps: int
    left_s: float | None
    metrics: Mapping[str, float]
    rewards: tuple[float, ...]
    evaluation: Mapping[str, float] | None
    trained_per_s: float | None
    generated_per_s: float
    version: int | None
    version_bytes: int
    open_groups: int
    ready_groups: int
    counts: Mapping[str, int]
    rollouts: tuple[RolloutLine, ...]
    restarts: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Title:
    """What stays the same while a run is watched."""

    run: str
    seed: int
    steps: int


def snapshot(
    state: RunState, roles: Sequence[RoleState], title: Title, started_s: float, now_s: float
) -> Snapshot:
    """The state at `now_s`, a wall clock that records share (seconds since the epoch)."""
    last = state.steps[-1] if state.steps else None
    recent = _recent(state.steps)
    rollouts = tuple(_line(state.rollouts[name], now_s) for name in sorted(state.rollouts))
    step = last.step if last else 0
    evaluation = state.evaluations[-1] if state.evaluations else None
    return Snapshot(
        title=f"{title.run} · seed {title.seed}",
        seconds=now_s - started_s,
        phase=_phase(state, step, title.steps),
        step=step,
        steps=title.steps,
        left_s=_left(recent, title.steps - step, now_s),
        metrics=last.metrics if last else {},
        rewards=tuple(done.metrics.get("reward_mean", 0.0) for done in state.steps),
        evaluation=evaluation,
        trained_per_s=_trained_per_s(recent),
        generated_per_s=sum(line.tokens_per_s for line in rollouts if line.state != "silent"),
        version=state.weights.version.number if state.weights else None,
        version_bytes=state.weights.bytes if state.weights else 0,
        open_groups=len(state.admitted),
        ready_groups=state.ready(),
        counts=state.counts(),
        rollouts=rollouts,
        restarts=sum(role.restarts for role in roles),
        notes=tuple(f"{role.name} {role.note}" for role in roles if role.note),
    )


def _phase(state: RunState, step: int, steps: int) -> str:
    if step >= steps:
        return "last evaluation"
    if state.weights is None:
        return "starting"
    return "training" if step else "first step"


def _line(beats: Sequence[RolloutStatus], now_s: float) -> RolloutLine:
    first, status = beats[0], beats[-1]
    is_silent = now_s - status.time_s > SILENT_S and status.health != "leaving"
    seconds = max(1e-9, status.time_s - first.time_s)
    tokens = status.tokens_total - first.tokens_total
    return RolloutLine(
        name=status.rollout,
        running=status.running,
        slots=status.slots,
        waiting=status.waiting,
        version=status.version.number,
        tokens_per_s=tokens / seconds if len(beats) > 1 else status.tokens_per_s,
        idle_share=min(1.0, (status.idle_s - first.idle_s) / seconds),
        state="silent" if is_silent else status.health,
    )


def _recent(steps: Sequence[StepDone]) -> list[StepDone]:
    """The last steps of one term: time between two terms is no training time."""
    last = list(steps)[-RATE_STEPS - 1 :]
    return [done for done in last if done.version.term == last[-1].version.term]


def _left(recent: Sequence[StepDone], remaining: int, now_s: float) -> float | None:
    """Seconds until the last step at the speed of the last steps."""
    if len(recent) < 2 or remaining <= 0:
        return None
    step_s = median(after.time_s - before.time_s for before, after in pairwise(recent))
    return max(0.0, recent[-1].time_s + remaining * step_s - now_s)


def _trained_per_s(recent: Sequence[StepDone]) -> float | None:
    if len(recent) < 2 or recent[-1].time_s <= recent[0].time_s:
        return None
    tokens = sum(done.metrics.get("tokens_trained", 0.0) for done in recent[1:])
    return tokens / (recent[-1].time_s - recent[0].time_s)
