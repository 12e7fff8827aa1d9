"""Scheduling metrics of a moment, and the mismatch of engine and trainer by task. Pure.

`consumers/trainer/learn/mismatch.py` defines the mismatch, which needs tokens of lag 0. If rollouts
run ahead, few steps have such tokens (the first step always does), so it covers the last steps that
compared any tokens, however old these steps are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rollstream.monitor.moves import RequestMove
from rollstream.monitor.rollouts import RolloutSnapshot
from rollstream.monitor.state import RunState
from rollstream.streams.records import StepDone

TOKENS_PREFIX = "mismatch_tokens/"
COMPARED_STEPS = 10


@dataclass(frozen=True, slots=True)
class TaskMismatch:
    """One task's |Δ log p| in nats over `tokens` tokens of lag 0; mean and KL estimate are weighted
    by tokens. `step` is the newest step with such tokens. If the task's newest step had none,
    `near_mean` is its mean at its smallest lag, `near_lag`.
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
    """Returns the mismatch of every task that these steps trained."""
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


RECENT_S = 60.0
MOVES_SHOWN = 3  # newest moves that are listed one by one


@dataclass(frozen=True, slots=True)
class LengthPredictions:
    """The last trajectories with a predicted length: their number, the medians of predicted
    (`expected`) and generated (`real`) tokens, and the median error as a share of `real`.
    """

    count: int
    expected: float
    real: float
    error_share: float


@dataclass(frozen=True, slots=True)
class SchedulingMetrics:
    """`queued` assignments wait at rollouts for their turn or for newer weights; `waiting` requests
    wait in engines for a slot or KV space. `moves` and `moved` count the moves and their requests
    of the last minute; `newest` lists the last moves with their ages in seconds.
    """

    queued: int
    waiting: int
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
