"""The phase of a run between start and end, derived from its records. Pure.

The supervisor records how a run ended. A run without a supervisor (on a cluster), or with a killed
one, counts as ended after a period without records.
"""

from typing import Any

from rollstream.monitor.rollouts import SILENT_S, rollout_snapshots
from rollstream.monitor.state import RunState
from rollstream.monitor.format import age

QUIET_S = 30.0  # sixty heartbeats: a run with a living rollout writes far more often
STARTING_S = 120.0  # a role loads libraries and model before it writes a record
EVALUATION_S = 240.0  # longer than the supervisor's wait for the last evaluation
ENDING_PHASES = {"complete": "finished", "stopped": "stopped", "failed": "failed"}


def phase_of(state: RunState, step: int, steps: int, now_s: float) -> str:
    """Returns the phase in one to three words."""
    ended = _last_ending(state)
    if ended is not None:
        return ENDING_PHASES[ended["event"]]
    if step >= steps:
        return "finished" if _is_idle(state, now_s) else "last evaluation"
    if is_quiet(state, now_s):
        return f"silent for {age(_quiet_s(state, now_s) or 0.0)}"
    if state.weights is None or (_quiet_s(state, now_s) or 0.0) > QUIET_S:
        return "starting"
    return "training" if step else "first step"


def is_over(state: RunState, step: int, steps: int, now_s: float) -> bool:
    """True if the run writes no more records unless it is restarted."""
    if _last_ending(state) is not None:
        return True
    return step >= steps and _is_idle(state, now_s)


def is_quiet(state: RunState, now_s: float) -> bool:
    """True if no record was written for `QUIET_S` although the log shows an unfinished run."""
    quiet_s = _quiet_s(state, now_s)
    if quiet_s is None or quiet_s <= QUIET_S:
        return False
    return not is_starting(state, now_s) and not _is_warming_up(state)


def is_starting(state: RunState, now_s: float) -> bool:
    """True if the supervisor started a process so recently that it may not have written yet."""
    starts = (event["time_s"] for event in state.events if event.get("event") == "start")
    return now_s - max(starts, default=float("-inf")) < STARTING_S


def _last_ending(state: RunState) -> dict[str, Any] | None:
    """Returns the supervisor's newest ending event, or None if a process was started after it."""
    for event in reversed(state.events):
        if event.get("event") in ENDING_PHASES:
            return event
        if event.get("event") == "start":
            return None
    return None


def _is_idle(state: RunState, now_s: float) -> bool:
    """True without a living rollout and without an evaluation that may still be running."""
    quiet_s = _quiet_s(state, now_s)
    if any(line.is_alive() for line in rollout_snapshots(state, now_s)):
        return False
    return quiet_s is None or quiet_s > (EVALUATION_S if state.events else SILENT_S)


def _quiet_s(state: RunState, now_s: float) -> float | None:
    """Returns the seconds since the newest record of any topic."""
    newest_s = max(state.newest_s.values(), default=None)
    return None if newest_s is None else now_s - newest_s


def _is_warming_up(state: RunState) -> bool:
    """True during warm-up and model loading, which write no records."""
    return state.weights is None and not state.rollouts
