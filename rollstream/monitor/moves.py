"""Repack moves of a run as lines of `metrics/moves.jsonl`.

Dispatch appends one line for each rollout that it asks to hand over requests; the live view and the
report read them. The `assignments` topic also records moves (releases with `onward`), but it is
truncated as trajectories end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.consumers.dispatch.moves import MoveSummary

MOVES_FILE = "moves.jsonl"


@dataclass(frozen=True, slots=True)
class RequestMove:
    """At `time_s` (seconds since the epoch) dispatch moved `requests` requests from `source` to
    `destination`; planning took `plan_s` seconds.
    """

    time_s: float
    source: str
    destination: str
    requests: int
    plan_s: float = 0.0


def move_line(move: "MoveSummary", plan_s: float, time_s: float) -> dict[str, Any]:
    """Returns the move as a line of `moves.jsonl`."""
    return {
        "time_s": time_s,
        "source": move.source,
        "destination": move.destination,
        "requests": move.requests,
        "plan_s": plan_s,
    }


def parse_moves(lines: Iterable[Mapping[str, Any]]) -> list[RequestMove]:
    """Returns the moves among the lines; other lines are skipped."""
    return [move for line in lines if (move := parse_move(line)) is not None]


def parse_move(line: Mapping[str, Any]) -> RequestMove | None:
    """Returns None for a line that is not a move: a monitor must not fail on a foreign line."""
    match line:
        case {
            "time_s": int() | float() as time_s,
            "source": str() as source,
            "destination": str() as destination,
            "requests": int() as requests,
        }:
            plan_s = line.get("plan_s")
            taken = float(plan_s) if isinstance(plan_s, int | float) else 0.0
            return RequestMove(float(time_s), source, destination, requests, taken)
        case _:
            return None
