"""The moves of a run as lines of `metrics/moves.jsonl`: dispatch appends one for each rollout that
is asked to hand requests over, the live view and the report read them.

The log says the same in more words (releases with `onward`), and forgets it with the orders.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consumers.dispatch.moves import Handed

MOVES = "moves.jsonl"


@dataclass(frozen=True, slots=True)
class Moved:
    """At `time_s` (seconds since the epoch) so many requests were asked back from `source`;
    `plan_s` is what planning took.
    """

    time_s: float
    source: str
    destination: str
    requests: int
    plan_s: float = 0.0


def move_line(move: "Handed", plan_s: float, time_s: float) -> dict[str, Any]:
    """For a metrics file."""
    return {
        "time_s": time_s,
        "source": move.source,
        "destination": move.destination,
        "requests": move.requests,
        "plan_s": plan_s,
    }


def moves_of(lines: Iterable[Mapping[str, Any]]) -> list[Moved]:
    """Those of the lines that say one."""
    return [move for line in lines if (move := move_of(line)) is not None]


def move_of(line: Mapping[str, Any]) -> Moved | None:
    """None for a line that is no move: who only looks has no use for an error about it."""
    match line:
        case {
            "time_s": int() | float() as time_s,
            "source": str() as source,
            "destination": str() as destination,
            "requests": int() as requests,
        }:
            plan_s = line.get("plan_s")
            taken = float(plan_s) if isinstance(plan_s, int | float) else 0.0
            return Moved(float(time_s), source, destination, requests, taken)
        case _:
            return None
