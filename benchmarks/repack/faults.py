"""Faults in a long-tail run: one of four rollouts is killed; dispatch is absent for a minute."""

import signal
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.runs.watched import Watched, slots_of, watched
from rollstream.streams.records import Partial, RolloutStatus, Trajectory
from testbed.run_process import read

VICTIM = "rollout-1"
BEFORE, AFTER = 3, 3  # steps
GAP_S, GAP_QUICK_S = 60.0, 20.0
GAP_SETTINGS = (
    "rollouts.on_update=in_flight",
    "dispatch.max_lag=8",
    "dispatch.queue_per_slot=16",
)
"""One minute is six of the accelerators' time: 13 answers a slot, four and a half steps."""


def kill_cases(folder: Path, paced: str) -> Iterator[Case]:
    """Yields `kill_kept` and `kill_pause_steps`."""
    with watched(folder, ()) as run:
        run.wait_for(lambda: BEFORE in run.steps)
        run.role(VICTIM).kill()
        killed_s = time.time()
        run.wait_for(lambda: BEFORE + AFTER in run.steps)
    made, finished, lost = _made(run.folder, run.beats[VICTIM], killed_s)
    open_ = max(1.0, made - finished)
    note = (
        f"{paced}; of the {open_:,.0f} tokens of its unfinished trajectories; of all {made:,.0f} "
        f"that it had generated {1 - lost / made:.2%}"
    )
    yield alone("kill_kept", 1 - lost / open_, "share", at_least=0.95, note=note)
    done = [run.steps[step].time_s for step in sorted(run.steps)]
    steps = [after - before for before, after in pairwise(done)]
    usual, longest = statistics.median(steps[: BEFORE - 1]), max(steps[BEFORE - 1 :])
    note = (
        f"{paced}; steps of {usual:.1f} s before, the longest of {AFTER} after the kill "
        f"{longest:.1f} s"
    )
    yield alone("kill_pause_steps", longest / usual - 1, "steps", at_most=1.0, note=note)


def _made(folder: Path, beats: list[RolloutStatus], killed_s: float) -> tuple[float, float, float]:
    """Tokens that the first term of the victim generated until it died, those of them in finished
    trajectories, and those that were lost. The time after its last heartbeat is extrapolated at the
    same speed.
    """
    last = [beat for beat in beats if beat.term == beats[0].term][-1]
    made = last.tokens_total + last.tokens_per_s * max(0.0, killed_s - last.time_s)
    brought: dict[tuple[str, int], int] = {}
    own: dict[str, int] = {}
    for one in read(folder, "partials", Partial):
        key = (one.trajectory, one.attempt)
        brought[key] = brought.get(key, 0) + len(one.logprobs)
        if (one.rollout, one.rollout_term) == (VICTIM, last.term):
            own[one.trajectory] = own.get(one.trajectory, 0) + len(one.logprobs)
    finished = 0
    for done in read(folder, "trajectories", Trajectory):
        if (done.rollout, done.rollout_term) == (VICTIM, last.term):
            earlier = sum(brought.get((done.trajectory, a), 0) for a in range(done.attempt))
            finished += len(done.logprobs) - earlier
            own.pop(done.trajectory, None)
    return made, float(finished), max(0.0, made - finished - sum(own.values()))


def gap_cases(folder: Path, paced: str, quick: bool) -> Iterator[Case]:
    """Yields `dispatch_gap_idle`: dispatch is frozen, so its lease is not taken and it is not
    restarted.
    """
    gap_s = GAP_QUICK_S if quick else GAP_S
    with watched(folder, GAP_SETTINGS) as run:
        run.wait_for(lambda: 1 in run.steps)
        run.rest(gap_s)
        before = _idle(run, gap_s)
        dispatch = run.role("dispatch")
        dispatch.send_signal(signal.SIGSTOP)
        try:
            run.rest(gap_s)
            gap = _idle(run, gap_s)
        finally:
            dispatch.send_signal(signal.SIGCONT)
    note = (
        f"{paced}; dispatch frozen for {gap_s:g} s, no standby; idle slot-seconds {before:.1%} → "
        f"{gap:.1%}; {', '.join(GAP_SETTINGS)}"
    )
    yield alone("dispatch_gap_idle", gap - before, "share", at_most=0.02, note=note)


def _idle(run: Watched, seconds: float) -> float:
    """Length of the window in seconds, up to now."""
    now_s = time.time()
    return slots_of(run, now_s - seconds, now_s).idle
