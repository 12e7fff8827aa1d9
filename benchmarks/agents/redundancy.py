"""Redundancy against slow and hanging environments: steps per second with three trajectories more
per group than it needs, over the same run without.

Groups of 8 on `waiting.toml`: each episode waits once for its environment, whose latency is normal
(10 s, deviation 5 s, at least 1 s) or Pareto (index 1.5, of the same mean), and a tenth of the
episodes hangs until the limit of 60 s, in both arms. Environments sleep, the engine is paced, all
else is real. The two arms of a pair run side by side.

What the latencies allow, by arithmetic: a group of 8 takes 41.6 s on average with normal ones and
44.4 s with Pareto ones, the eighth of 11 comes after 14.4 and 11.5 s, so 2.9 and 3.9, together 3.3.
That would be the bound if no group expired. But `max_lag` is five steps: without redundancy about
one group in eight waits so long for a hanging episode that its tokens are too old, with it one in
eighty.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from benchmarks.agents.world import CONFIGURATION, options
from benchmarks.case import Case, against
from benchmarks.runs.watched import Watched, watched

SHAPES = ("gauss", "pareto")
MORE = 3
LIMIT_S, HANG = 60.0, 0.1
WARM_S, WINDOW_S, WINDOW_QUICK_S = 65.0, 150.0, 60.0
# Both arms open 24 groups: 6 × 4, of 8 or 11 episodes.
SETTINGS = (
    "trainer.steps=10000",
    "trainer.groups_per_step=4",
    "dispatch.max_lag=5",
    "rollouts.slots=96",
)


def cases(quick: bool) -> Iterator[Case]:
    """Yields the ratio for each shape, then that of all steps of both shapes."""
    total = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for shape in SHAPES:
        steps, seconds = _pair(shape, WINDOW_QUICK_S if quick else WINDOW_S)
        for arm in (True, False):
            # Weighted so that both shapes count alike: seconds of one step.
            total[arm][0] += 1
            total[arm][1] += seconds / max(1, steps[arm])
        yield against(
            f"agents_redundancy_{shape}",
            steps[True] / seconds,
            "steps/s",
            "the same run without redundancy",
            steps[False] / seconds,
            note=_note(f"{steps[True]} and {steps[False]} steps in {seconds:.0f} s"),
        )
    fast, slow = (total[arm][0] / total[arm][1] for arm in (True, False))
    yield against(
        "agents_redundancy",
        fast,
        "steps/s",
        "the same runs without redundancy",
        slow,
        3.4,
        _note("seconds of a step, mean of both shapes"),
    )


def _note(what: str) -> str:
    return f"sleeping environments, paced engine, real time; groups of 8 + {MORE}; {what}"


def _pair(shape: str, window_s: float) -> tuple[dict[bool, int], float]:
    """Returns the steps of each arm in one window, and its seconds."""
    with tempfile.TemporaryDirectory(prefix="rollstream-redundancy-") as scratch, ExitStack() as on:
        runs = {arm: on.enter_context(_arm(Path(scratch), shape, arm)) for arm in (True, False)}
        for run in runs.values():
            run.wait_for(lambda run=run: 1 in run.steps)
        _look(runs, WARM_S)
        before = {arm: max(run.steps) for arm, run in runs.items()}
        began = time.monotonic()
        _look(runs, window_s)
        seconds = time.monotonic() - began
        return {arm: max(run.steps) - before[arm] for arm, run in runs.items()}, seconds


def _look(runs: dict[bool, Watched], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for run in runs.values():
            run.rest(0.2)


def _arm(scratch: Path, shape: str, has_redundancy: bool) -> AbstractContextManager[Watched]:
    more = MORE if has_redundancy else 0
    settings = (
        *SETTINGS,
        *options(turns=2, shape=shape, hang=HANG),
        f"task.redundancy={more}",
        f"task.reply_timeout_s={LIMIT_S}",
    )
    return watched(scratch / f"{shape}-{more}", settings, CONFIGURATION)
