"""Repack on real processes: its gain, the cost of a move, and the cost of a killed rollout and of
an absent dispatch (docs/explanation/scheduling.md).

All cases use `examples/longtail.toml` with four rollouts and the paced engine: lengths are drawn
and decode times computed, everything else is real. Both arms of a pair have the same seed,
admission and window. The window starts with the third step, once every rollout has taken a version
(the first is published only after the trainer's first step), and ends before the run does.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, alone, paired
from benchmarks.repack.faults import gap_cases, kill_cases
from benchmarks.repack.move_costs import Cost, cost_of
from benchmarks.runs.watched import Slots, slots_of, throughput, watched

PAIRS, PAIRS_QUICK = 5, 1
WINDOW_S, WINDOW_QUICK_S = 90.0, 45.0  # three cycles of draw and drain
WARM = 3  # steps
PACED = "paced engine: lengths drawn, times computed"


@dataclass(frozen=True, slots=True)
class Arm:
    """The measured window of one run."""

    tokens_per_s: float
    slots: Slots
    cost: Cost


def cases(quick: bool) -> Iterator[Case]:
    """Yields `repack_real` with the slots and moves of its runs, then the faults."""
    with tempfile.TemporaryDirectory(prefix="rollstream-repack-") as scratch:
        base = Path(scratch)
        window_s = WINDOW_QUICK_S if quick else WINDOW_S
        pairs = [_pair(base, seed, window_s) for seed in range(PAIRS_QUICK if quick else PAIRS)]
        yield from _pair_cases([one for one, _ in pairs], [other for _, other in pairs])
        yield from kill_cases(base / "kill", PACED)
        yield from gap_cases(base / "gap", PACED, quick)


def _pair(base: Path, seed: int, window_s: float) -> tuple[Arm, Arm]:
    """With and without repack; the arm that runs first alternates."""
    order = (True, False) if seed % 2 == 0 else (False, True)
    found = {repack: _arm(base / f"{seed}-{repack}", repack, seed, window_s) for repack in order}
    return found[True], found[False]


def _arm(folder: Path, repack: bool, seed: int, window_s: float) -> Arm:
    settings = (f"dispatch.repack={str(repack).lower()}", f"seed={seed}")
    with watched(folder, settings) as run:
        run.wait_for(lambda: WARM in run.steps)
        begin_s = run.steps[WARM].time_s
        run.rest(begin_s + window_s - time.time())
        end_s = min(beats[-1].time_s for beats in run.beats.values())
        found = throughput(run, begin_s, end_s), slots_of(run, begin_s, end_s)
    cost = cost_of(folder)
    shutil.rmtree(folder)  # three gigabytes
    return Arm(*found, cost)


def _pair_cases(with_: Sequence[Arm], without: Sequence[Arm]) -> Iterator[Case]:
    def mean(arms: Sequence[Arm], name: str) -> float:
        return statistics.fmean(getattr(arm.slots, name) for arm in arms)

    note = (
        f"{PACED}; KV used {mean(without, 'kv'):.0%} → {mean(with_, 'kv'):.0%}, slots running "
        f"{mean(without, 'running'):.0%} → {mean(with_, 'running'):.0%}; started again: "
        f"{sum(arm.cost.again for arm in without)} → {sum(arm.cost.again for arm in with_)}"
    )
    yield paired(
        "repack_real",
        [arm.tokens_per_s for arm in with_],
        "tok/s",
        "the same run with dispatch.repack=false",
        [arm.tokens_per_s for arm in without],
        1.26,
        note,
    )
    busy = statistics.median(arm.slots.busy_outside for arm in with_)
    outside, bound = 1 - mean(with_, "draining"), mean(with_, "bound_outside")
    note = (
        f"{PACED}; of rollouts' time in which they do not say `draining` ({outside:.0%} of all): "
        f"{mean(with_, 'running_outside'):.1%} run, {bound:.1%} are empty because requests wait in "
        "the engine for KV, which counts as busy"
    )
    yield alone("slots_busy", busy, "share", at_least=0.90, note=note)
    costs = [arm.cost for arm in with_]
    moved = [one for cost in costs for one in cost.resumed_ms]
    asked = [one for cost in costs for one in cost.asked_ms]
    plans = [one for cost in costs for one in cost.plan_ms]
    if moved:
        note = (
            f"{PACED}; given up → submitted at its destination, median of {len(moved)} requests in "
            f"{len(plans)} moves, p90 {_p90(moved):.0f} ms; asked back → given up "
            f"{statistics.median(asked):.0f} ms; dispatch planned {statistics.median(plans):.1f} ms"
        )
        yield alone("repack_move_ms", statistics.median(moved), "ms", note=note)


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]
