"""Finds the kinds of machines among the rollouts, from their speeds in about equal batches: a
request is faster in a small one. Pure (invariant 9).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, log2

import numpy as np
from numpy.typing import NDArray

REPORTS_SMOOTHED = 32  # reports of one batch class over which the speed there is smoothed
REPORTS_MIN = 4  # reports of a batch class before it counts
CLASSES_PER_DOUBLING = 2  # batches of one class differ by at most a factor of √2
KIND_RATIO = 1.5
"""Two rollouts are of unlike kinds if one is faster by more than this factor, with no third in
between. A choice: within a batch class equal machines differ by up to 1.3 in the paced engine (by
the KV cache that a step reads), cards that are rented side by side by 1.6 and more (bandwidth of an
H100, A100, L40S and L4: 3.35, 2.04, 0.86 and 0.3 TB/s).
"""
ROUNDS = 16  # of the alternating fit, which ends in a few where batches overlap


@dataclass(frozen=True, slots=True)
class ClassSpeed:
    """Tokens per second of one request, smoothed over `reports`."""

    speed: float
    reports: int


@dataclass(frozen=True, slots=True)
class SpeedReports:
    by_class: Mapping[int, ClassSpeed] = field(default_factory=dict[int, ClassSpeed])

    def with_report(self, running: int, tokens_per_s: float) -> "SpeedReports":
        at, new = batch_class(running), tokens_per_s / running
        previous = self.by_class.get(at, ClassSpeed(new, 0))
        reports = min(previous.reports + 1, REPORTS_SMOOTHED)
        speed = previous.speed + (new - previous.speed) / reports
        return SpeedReports({**self.by_class, at: ClassSpeed(speed, reports)})


def batch_class(running: int) -> int:
    return int(CLASSES_PER_DOUBLING * log2(running))


def relative_speeds(reports: Mapping[str, SpeedReports]) -> dict[str, float]:
    """The speed of each rollout relative to the others; their geometric mean is 1. A rollout whose
    batches overlap with those of no other counts as 1.
    """
    names = sorted(reports)
    points = [
        (number, at, log(class_speed.speed))
        for number, name in enumerate(names)
        for at, class_speed in reports[name].by_class.items()
        if class_speed.reports >= REPORTS_MIN and class_speed.speed > 0
    ]
    if not points:
        return dict.fromkeys(names, 1.0)
    rows: NDArray[np.float64] = np.array(points, np.float64)
    rollout, at, value = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2]
    # Fits log(speed) = rollout + batch class by least squares, alternately for both.
    of_rollout = np.zeros(len(names))
    for _ in range(ROUNDS):
        of_class = _means(at, value - of_rollout[rollout], int(at.max()) + 1)
        of_rollout = _means(rollout, value - of_class[at], len(names))
    relative = np.exp(of_rollout - of_rollout.mean())
    return {name: float(speed) for name, speed in zip(names, relative, strict=True)}


def _means(at: NDArray[np.int64], values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The mean of the values at each of `count` indices, 0 where there are none."""
    return np.bincount(at, values, count) / np.maximum(1, np.bincount(at, minlength=count))


def speed_kinds(speeds: Sequence[float]) -> tuple[int, ...]:
    """The kind of each rollout; 0 is the slowest."""
    kinds: dict[float, int] = {}
    kind, before = 0, 0.0
    for speed in sorted(speeds):
        kind += 0 < before * KIND_RATIO < speed
        kinds[speed], before = kind, speed
    return tuple(kinds[speed] for speed in speeds)
