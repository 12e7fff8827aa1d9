"""Each rollout's present state, waiting and moved work, and the mismatch of engine and trainer by
task, as pure functions of a `RunState`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rollstream.look.monitor.state import RequestMove, RunState
from rollstream.streams.records import Applied, RolloutStatus, StepDone
from rollstream.streams.values import Version

# Ten intervals without a heartbeat: the rollout is `silent`. One that sends heartbeats, but whose
# loop has made no progress for this time, is `stalled`.
SILENT_S = 5.0


@dataclass(frozen=True, slots=True)
class RolloutSnapshot:
    """Trajectories, KV cache (in tokens), weights and speed. `verified` is False if its weights
    were not checked, or differ from the announced ones. `state` is `silent`, `stalled` or the
    health that it reports. Speed and idle share are means over the last heartbeats.
    """

    name: str
    running: int
    slots: int
    waiting: int
    kv_used: int
    kv_capacity: int
    version: int
    verified: bool
    tokens_per_s: float
    recent_idle_share: float
    silent_s: float
    state: str
    queued: int = 0
    """The part of `waiting` that is not in the engine yet."""
    parked: int = 0
    idle_total: float = 0.0
    """Of the idle and computing seconds since the rollout's start; 0 if the engine does not report
    its computing time.
    """

    def is_alive(self) -> bool:
        return self.state not in ("silent", "leaving")

    def severity_key(self) -> tuple[bool, bool, float]:
        """Sorts silent rollouts first, then unverified ones, then the most idle."""
        return (self.state != "silent", self.verified, -self.recent_idle_share)


def rollout_snapshots(state: RunState, now_s: float) -> tuple[RolloutSnapshot, ...]:
    """Returns the rollout snapshots by name; numbers in names sort numerically."""
    lines = (
        _snapshot(
            beats,
            state.applied.get(name),
            state.announced,
            now_s,
            state.clock_offsets.get(name, 0.0),
        )
        for name, beats in state.rollouts.items()
    )
    return tuple(sorted(lines, key=lambda line: _natural(line.name)))


def worst_first(lines: Sequence[RolloutSnapshot]) -> list[RolloutSnapshot]:
    return sorted(lines, key=lambda line: line.severity_key())


def _snapshot(
    beats: Sequence[RolloutStatus],
    applied: Applied | None,
    announced: Mapping[Version, str],
    now_s: float,
    offset_s: float,
) -> RolloutSnapshot:
    first, status = beats[0], beats[-1]
    silent_s = max(0.0, now_s - status.time_s - offset_s)
    is_silent = silent_s > SILENT_S and status.health != "leaving"
    seconds = max(1e-9, status.time_s - first.time_s)
    tokens = status.tokens_total - first.tokens_total
    return RolloutSnapshot(
        name=status.rollout,
        running=status.running,
        slots=status.slots,
        waiting=status.waiting,
        kv_used=status.kv_used,
        kv_capacity=status.kv_capacity,
        version=status.version.number,
        verified=status.verified and _is_announced(applied, announced),
        tokens_per_s=tokens / seconds if len(beats) > 1 else status.tokens_per_s,
        recent_idle_share=min(1.0, (status.idle_s - first.idle_s) / seconds),
        silent_s=silent_s,
        state=_state(status, is_silent),
        queued=status.queued,
        parked=status.parked,
        idle_total=status.idle_s / (status.idle_s + status.busy_s) if status.busy_s else 0.0,
    )


def _state(status: RolloutStatus, is_silent: bool) -> str:
    if is_silent:
        return "silent"
    return "stalled" if status.stalled_s > SILENT_S else status.health


def _is_announced(applied: Applied | None, announced: Mapping[Version, str]) -> bool:
    # An unknown hash of either side proves nothing.
    return applied is None or announced.get(applied.version, applied.hash) == applied.hash


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    parts: list[str] = []
    for character in name:
        if parts and parts[-1][-1].isdecimal() == character.isdecimal():
            parts[-1] += character
        else:
            parts.append(character)
    # `rollout-2` comes before `rollout-10`.
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


TOKENS_PREFIX = "mismatch_tokens/"
# Newest steps with compared tokens that the mismatch covers.
COMPARED_STEPS = 10


@dataclass(frozen=True, slots=True)
class TaskMismatch:
    """|Δ log p| between engine and trainer, in nats, over `tokens` tokens of lag 0: `mean`,
    `largest`, the estimated KL divergence `kl`, and `above_share`, the share of tokens above
    `TOKEN_MAX` (`mismatch.py`). `step` is the newest step with tokens of lag 0, 0 if there is none.
    If the task's newest step has none, `near_lag` is the smallest lag of its tokens, and
    `near_mean` their mean difference.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    above_share: float
    step: int
    near_lag: int | None = None
    near_mean: float = 0.0


def mismatch_by_task(steps: Sequence[StepDone]) -> dict[str, TaskMismatch]:
    names = {name for done in steps for name in done.metrics if name.startswith(TOKENS_PREFIX)}
    return {
        task: _task_mismatch(task, steps)
        for task in sorted(n.removeprefix(TOKENS_PREFIX) for n in names)
    }


def _task_mismatch(task: str, steps: Sequence[StepDone]) -> TaskMismatch:
    def figure(done: StepDone, name: str) -> float:
        return done.metrics.get(f"mismatch_{name}/{task}", 0.0)

    def mean(name: str) -> float:
        weighted = sum(figure(done, "tokens") * figure(done, name) for done in compared)
        return weighted / max(1.0, tokens)

    newest = next(done for done in reversed(steps) if TOKENS_PREFIX + task in done.metrics)
    # If rollouts lag behind, few steps train tokens of lag 0, the only ones that are compared: the
    # last steps that have any count, however old.
    compared = [done for done in steps if figure(done, "tokens")][-COMPARED_STEPS:]
    tokens = sum(figure(done, "tokens") for done in compared)
    is_far = f"mismatch_near_lag/{task}" in newest.metrics
    return TaskMismatch(
        tokens=int(tokens),
        mean=mean("mean"),
        largest=max((figure(done, "max") for done in compared), default=0.0),
        kl=mean("kl"),
        above_share=mean("above"),
        step=compared[-1].step if compared else 0,
        near_lag=int(figure(newest, "near_lag")) if is_far else None,
        near_mean=figure(newest, "near_mean"),
    )


# Moves younger than this are counted.
RECENT_S = 60.0
# Newest moves that are listed one by one.
MOVES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LengthPredictions:
    """Dispatch's predicted lengths (`expected`) against the generated ones (`real`), in tokens, as
    medians over the last `count` finished trajectories; `error_share` is of the generated tokens.
    """

    count: int
    expected: float
    real: float
    error_share: float


@dataclass(frozen=True, slots=True)
class SchedulingMetrics:
    """`queued` trajectories wait at rollouts, `waiting` ones in engines for a slot or KV space,
    `parked` dialogues for their environment. `moves` are those of the last minute, `moved` the
    trajectories in them; `newest` are the last, with their ages in seconds.
    """

    queued: int
    waiting: int
    parked: int
    moves: int
    moved: int
    newest: tuple[tuple[RequestMove, float], ...]
    foreseen: LengthPredictions | None


def scheduling_metrics(
    state: RunState, lines: Sequence[RolloutSnapshot], at_s: float
) -> SchedulingMetrics:
    alive = [line for line in lines if line.is_alive()]
    recent = [move for move in state.moves if at_s - move.time_s <= RECENT_S]
    newest = list(reversed(state.moves))[:MOVES_SHOWN]
    queued = sum(line.queued for line in alive)
    return SchedulingMetrics(
        queued=queued,
        waiting=max(0, sum(line.waiting for line in alive) - queued),
        parked=sum(line.parked for line in alive),
        moves=len(recent),
        moved=sum(move.requests for move in recent),
        newest=tuple((move, max(0.0, at_s - move.time_s)) for move in newest),
        foreseen=_predictions(state.samples.predicted_lengths()),
    )


def _predictions(pairs: Sequence[tuple[int, int]]) -> LengthPredictions | None:
    if not pairs:
        return None
    return LengthPredictions(
        count=len(pairs),
        expected=median(expected for expected, _ in pairs),
        real=median(real for _, real in pairs),
        error_share=median(abs(expected - real) / max(1, real) for expected, real in pairs),
    )
