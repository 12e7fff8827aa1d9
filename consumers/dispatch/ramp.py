"""More rollouts for longer answers: the second tier of RhymeRL's HistoPipe (arXiv 2508.18588).
Pure.

With one rollout per ranking group the end times of the groups grow like the lengths, steeply at the
end. If the long groups get more of the same rollouts, the end times form a ramp: group g of G ends
at (g + 1) / G of the last group's time. The functions here search the ramp with the least such
time.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1 + 1e-9


def end_times(
    longest: Sequence[float], samples: int, workers: int, step: Callable[[float], float]
) -> NDArray[np.float64]:
    """Array [g, n − 1]: the time at which `samples` answers of group g, the longest of `longest[g]`
    tokens, end on n rollouts; `step(batch)` is the time of one decode step.
    """
    steps = [step(samples / n) for n in range(1, workers + 1)]
    return np.outer(np.asarray(longest, np.float64), steps)


def share_out(times: NDArray[np.float64]) -> tuple[int, ...]:
    """Rollouts for each group, shortest first; every group gets at least one, and all rollouts are
    used.

    `times[g, n − 1]` is the end time of group g on n rollouts and must not grow with n. There must
    be no more groups than rollouts.
    """
    groups, workers = times.shape
    assert 0 < groups <= workers, f"{groups} ranking groups for {workers} rollouts"
    ramp: NDArray[np.float64] = np.arange(1, groups + 1, dtype=np.float64) / float(groups)
    targets: NDArray[np.float64] = np.unique(times / ramp[:, None])
    low, high = 0, len(targets) - 1
    while low < high:
        middle = (low + high) // 2
        if _rollouts_needed(times, ramp * targets[middle]).sum() <= workers:
            high = middle
        else:
            low = middle + 1
    found = _rollouts_needed(times, ramp * targets[low])
    if found.sum() > workers:  # no ramp is possible: one each, the others to the longest group
        found = np.ones(groups, np.int64)
    found[-1] += workers - found.sum()
    return tuple(int(n) for n in found)


def _rollouts_needed(times: NDArray[np.float64], until: NDArray[np.float64]) -> NDArray[np.int64]:
    """Fewest rollouts per group that end it in time; one more than exist where none do."""
    late: NDArray[np.int64] = (times > until[:, None] * ROUNDING).sum(axis=1)
    return late + 1
