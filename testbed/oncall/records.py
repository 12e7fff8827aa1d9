"""Records of a small healthy run at lag 1: twenty steps of four groups of four samples; the newest
step ended two seconds before `NOW_S`. Each function makes one record, with changes to its fields if
they are given.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rollstream.streams.records import (
    Admitted,
    Applied,
    Record,
    RolloutStatus,
    StepDone,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.values import Address, GroupMembers, Member, Span, Version

NOW_S = 1_700_000_000.0
STEP_S = 2.0
STEPS = 20
GROUPS, SAMPLES, LENGTH = 4, 4, 30
SETTINGS: dict[str, Any] = {
    "trainer": {"groups_per_step": GROUPS, "samples_per_group": SAMPLES, "steps": 60},
    "dispatch": {"max_lag": 4},
}


class AppliesRecords(Protocol):
    """A state of a run, or a log of one."""

    def apply(self, record: Record, time_s: float = 0.0) -> None: ...


def half(index: int) -> float:
    """Rewards of which half are 1."""
    return float(index % 2)


def begin_s(step: int) -> float:
    """When a step ended; the newest did two seconds ago."""
    return NOW_S - (STEPS - step + 1) * STEP_S


def apply_healthy(
    run: AppliesRecords, rollouts: int = 2, reward: Callable[[int], float] = half
) -> None:
    """Twenty steps trained, four groups open, rollouts busy."""
    for step in range(1, STEPS + 1):
        apply_step(run, step, reward)
    for group in range(STEPS * GROUPS, (STEPS + 1) * GROUPS):
        run.apply(admitted(group), NOW_S - 1)
    for number in range(rollouts):
        run.apply(status(f"rollout-{number}"), NOW_S - 0.2)


def apply_step(run: AppliesRecords, step: int, reward: Callable[[int], float] = half) -> None:
    """One step, trained on groups of its own and announced."""
    at_s = begin_s(step)
    groups = range((step - 1) * GROUPS, step * GROUPS)
    for group in groups:
        run.apply(admitted(group), at_s - STEP_S)
        for index in range(SAMPLES):
            run.apply(finished(group, index, reward(index), step), at_s - 0.5)
    run.apply(take(step, groups), at_s - 0.1)
    run.apply(done(step), at_s)
    run.apply(announced(step), at_s)


def names(group: int) -> tuple[str, ...]:
    return tuple(f"{group}.{index}" for index in range(SAMPLES))


def admitted(group: int) -> Admitted:
    return Admitted(group, group // GROUPS, names(group), 600.0, Address(0, group))


def finished(
    group: int, index: int, reward: float | None, step: int = 1, **changes: Any
) -> Trajectory:
    values: dict[str, Any] = {
        "trajectory": f"{group}.{index}",
        "group": group,
        "index": index,
        "attempt": 1,
        "task": "remainder",
        "rollout": "rollout-0",
        "rollout_term": 1,
        "tokens": np.zeros(LENGTH + 4, np.uint32),
        "sources": np.array([0] * 4 + [1] * LENGTH, np.uint8),
        "logprobs": np.zeros(LENGTH, np.float32),
        "spans": (Span(0, LENGTH, Version(max(0, step - 2), 1)),),
        "finish": "stop",
        "reward": reward,
        "trainer_version": Version(step - 1, 1),
        "started_s": begin_s(step) - 2,
        "finished_s": begin_s(step) - 0.5,
    }
    return Trajectory(**{**values, **changes})


def take(step: int, groups: Sequence[int]) -> Take:
    members = {g: tuple(Member(name, Address(0, 0), "00") for name in names(g)) for g in groups}
    together = tuple(GroupMembers(group, named) for group, named in members.items())
    return Take(step, 0, 0, tuple(m for named in members.values() for m in named), together)


def done(
    step: int,
    at_s: float | None = None,
    counts: Mapping[str, int] | None = None,
    **metrics: float,
) -> StepDone:
    values = {
        "reward_mean": 0.5,
        "tokens_trained": float(GROUPS * SAMPLES * LENGTH),
        "lag_consumed_mean": 1.0,
        "lag_consumed_max": 1.0,
        "lag_finish_mean": 0.8,
        "lag_finish_max": 1.0,
        "length_median": 30.0,
        "length_p99": 40.0,
        "seconds": STEP_S,
        "wait_s": 0.2,
        **metrics,
    }
    when = begin_s(step) if at_s is None else at_s
    return StepDone(step, Version(step, 1), "00", 1, values, dict(counts or {}), when)


def announced(step: int) -> WeightsAnnounced:
    return WeightsAnnounced("run", Version(step, 1), "x", "h", "anchor", None, 9_000, begin_s(step))


def applied(name: str, manifest_hash: str, step: int = STEPS) -> Applied:
    return Applied(name, 1, Version(step, 1), manifest_hash, "hashes", 40, 0.1, NOW_S)


def status(name: str, at_s: float = NOW_S - 0.2, **changes: Any) -> RolloutStatus:
    values: dict[str, Any] = {
        "rollout": name,
        "term": 1,
        "slots": 64,
        "running": 60,
        "waiting": 3,
        "kv_used": 20_000,
        "kv_capacity": 32_768,
        "version": Version(STEPS, 1),
        "verified": True,
        "health": "generating",
        "quota_left": 0,
        "tokens_per_s": 3700.0,
        "tokens_total": 180_000,
        "idle_s": 1.0,
        "time_s": at_s,
    }
    return RolloutStatus(**{**values, **changes})
