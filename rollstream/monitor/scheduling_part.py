"""Scheduling metrics of a moment: repack moves, waiting requests, and the error of predicted
lengths. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rollstream.monitor.moves import RequestMove
from rollstream.monitor.rollouts import RolloutSnapshot
from rollstream.monitor.state import RunState

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


def scheduling_metrics(state: RunState, lines: Sequence[RolloutSnapshot], at_s: float) -> SchedulingMetrics:
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
