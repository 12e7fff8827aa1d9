"""More rollouts for longer answers: the second tier of RhymeRL's HistoPipe (arXiv 2508.18588).
Pure.

With one rollout per ranking group the times at which groups end grow like the lengths do, steeply
at the end. Given to the long groups, the same rollouts end in a ramp: group g of G at (g + 1) / G
of the last one's time. The least such time is searched.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1 + 1e-9


def end_times(
    longest: Sequence[float], samples: int, workers: int, step: Callable[[float], float]
) -> NDArray[np.float64]:
    """[g, n − 1]: when `samples` answers of group g, `longest[g]` tokens the longest, end on n
    rollouts, `step(batch)` being the time of one decode step.
    """
    steps = [step(samples / n) for n in range(1, workers + 1)]
    return np.outer(np.asarray(longest, np.float64), steps)


def share_out(times: NDArray[np.float64]) -> tuple[int, ...]:
    """Rollouts for each group, shortest first, at least one each and all of them given.

    `times[g, n − 1]` is when group g ends on n rollouts, and never grows with n. There must be no
    more groups than rollouts.
    """
    groups, workers = times.shape
    assert 0 < groups <= workers, f"{groups} ranking groups for {workers} rollouts"
    ramp: NDArray[np.float64] = np.arange(1, groups + 1, dtype=np.float64) / float(groups)
    targets: NDArray[np.float64] = np.unique(times / ramp[:, None])
    low, high = 0, len(targets) - 1
    while low < high:
        middle = (low + high) // 2
        if _needed(times, ramp * targets[middle]).sum() <= workers:
            high = middle
        else:
            low = middle + 1
    found = _needed(times, ramp * targets[low])
    if found.sum() > workers:  # no ramp is possible: one each, the rest to the longest
        found = np.ones(groups, np.int64)
    found[-1] += workers - found.sum()
    return tuple(int(n) for n in found)


def _needed(times: NDArray[np.float64], until: NDArray[np.float64]) -> NDArray[np.int64]:
    """Fewest rollouts per group that end it in time; one more than there are where none does."""
    late: NDArray[np.int64] = (times > until[:, None] * ROUNDING).sum(axis=1)
    return late + 1
