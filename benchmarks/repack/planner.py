"""A repack plan for ten thousand rollouts of 64 slots: half of them full, half draining with loads
drawn uniformly, all of one version, which is the hardest case.

`planner_10000_ms` is one whole plan, candidates included, on one core; the median of several.
"""

import random
import statistics
import time
from collections.abc import Iterator

from benchmarks.case import Case, alone
from rollstream.consumers.dispatch.repack import RolloutLoad, plan_repack
from rollstream.streams.values import Version

ROLLOUTS = 10_000
SLOTS = 64
KV = 64 * 8192
GOAL_MS = 100.0


def cases(quick: bool) -> Iterator[Case]:
    """Plans once with scarce KV memory and once with scarce slots; the slower one counts."""
    times = 5 if quick else 15
    found: list[tuple[float, str, int]] = []
    for scarce, kv_of_request in (("KV", KV // SLOTS), ("batch", KV // SLOTS // 8)):
        loads = [_load(number, kv_of_request) for number in range(ROLLOUTS)]
        found.append((_plan_ms(loads, times), scarce, len(plan_repack(loads))))
    value, scarce, moves = max(found)
    note = f"{moves} of {ROLLOUTS // 2} tails moved, {scarce} scarce; {ROLLOUTS} rollouts"
    yield alone("planner_10000_ms", value, "ms", at_most=GOAL_MS, note=note)


def _load(number: int, kv_of_request: int) -> RolloutLoad:
    draw = random.Random(number)
    is_full = number % 2 == 0
    running = SLOTS if is_full else draw.randint(1, SLOTS - 1)
    used = min(KV, round(running * kv_of_request * draw.uniform(0.5, 1.5)))
    return RolloutLoad(
        rollout=f"rollout-{number:05d}",
        version=Version(41, 1),
        running=running,
        waiting=8 if is_full else 0,
        kv_used=KV if is_full else used,
        kv_previous=KV,
        kv_capacity=KV,
        batch_max=SLOTS,
    )


def _plan_ms(loads: list[RolloutLoad], times: int) -> float:
    taken: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        plan_repack(loads)
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken)
