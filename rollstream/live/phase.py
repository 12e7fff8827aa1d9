"""Where a run is between its start and its end, as far as an onlooker can tell. Pure.

The supervisor says how a run ended. A run without one (a cluster), or whose supervisor was killed,
says it by silence.
"""

from typing import Any

from rollstream.live.rollouts import SILENT_S, rollout_lines
from rollstream.live.state import RunState
from rollstream.live.words import age

QUIET_S = 30.0  # sixty heartbeats: a run with any rollout alive writes far more often
STARTING_S = 120.0  # a role loads its libraries and its model before it says anything
EVALUATION_S = 240.0  # longer than a supervisor waits for an evaluation after the last step
ENDINGS = {"complete": "finished", "stopped": "stopped", "failed": "failed"}


def phase_of(state: RunState, step: int, steps: int, now_s: float) -> str:
    """In a few words."""
    ended = _ending(state)
    if ended is not None:
        return ENDINGS[ended["event"]]
    if step >= steps:
        return "finished" if _is_deserted(state, now_s) else "last evaluation"
    if is_quiet(state, now_s):
        return f"silent for {age(_quiet_s(state, now_s) or 0.0)}"
    if state.weights is None or (_quiet_s(state, now_s) or 0.0) > QUIET_S:
        return "starting"
    return "training" if step else "first step"


def is_over(state: RunState, step: int, steps: int, now_s: float) -> bool:
    """Whether nothing will come any more, unless somebody starts the run again."""
    if _ending(state) is not None:
        return True
    return step >= steps and _is_deserted(state, now_s)


def is_quiet(state: RunState, now_s: float) -> bool:
    """Whether nothing is written although the run goes on, as far as its log says."""
    quiet_s = _quiet_s(state, now_s)
    if quiet_s is None or quiet_s <= QUIET_S:
        return False
    return not is_starting(state, now_s) and not _is_warming(state)


def is_starting(state: RunState, now_s: float) -> bool:
    """Whether the supervisor started a process just now, which may have nothing to say yet."""
    starts = (event["time_s"] for event in state.events if event.get("event") == "start")
    return now_s - max(starts, default=float("-inf")) < STARTING_S


def _ending(state: RunState) -> dict[str, Any] | None:
    """How the supervisor said that it ended, if nothing was started after that."""
    for event in reversed(state.events):
        if event.get("event") in ENDINGS:
            return event
        if event.get("event") == "start":
            return None
    return None


def _is_deserted(state: RunState, now_s: float) -> bool:
    """No rollout, and no evaluation that a supervisor would still say the end of."""
    quiet_s = _quiet_s(state, now_s)
    if any(line.is_alive() for line in rollout_lines(state, now_s)):
        return False
    return quiet_s is None or quiet_s > (EVALUATION_S if state.events else SILENT_S)


def _quiet_s(state: RunState, now_s: float) -> float | None:
    """Since the newest record of any topic."""
    newest_s = max(state.newest_s.values(), default=None)
    return None if newest_s is None else now_s - newest_s


def _is_warming(state: RunState) -> bool:
    """The warm-up and the loading of models write no records."""
    return state.weights is None and not state.rollouts
