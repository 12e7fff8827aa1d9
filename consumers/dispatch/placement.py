"""Decides which rollout gets which samples. The functions are pure (invariant 9).

`lay_out_wave` ranks a wave's prompts by expected length and gives each part of the ranking its
rollouts; `place_samples` places samples, with or without such a ranking. No sample waits for a
better place: a free slot on any rollout is used (docs/explanation/scheduling.md, Placement).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1 + 1e-9  # an end time that is later by rounding still meets its deadline


def end_times(
    longest: Sequence[float], samples: int, workers: int, step: Callable[[float], float]
) -> NDArray[np.float64]:
    """Returns an array [g, n − 1]: the time at which `samples` answers of group g, the longest of
    `longest[g]` tokens, end on n rollouts; `step(batch)` is the time of one decode step.
    """
    steps = [step(samples / n) for n in range(1, workers + 1)]
    return np.outer(np.asarray(longest, np.float64), steps)


def share_out(times: NDArray[np.float64]) -> tuple[int, ...]:
    """Returns the number of rollouts for each ranking group, shortest first; every group gets at
    least one, and all rollouts are used.

    Longer groups get more rollouts. With equally many rollouts for each group the end times of the
    groups grow like the lengths, steeply at the end. With more of the rollouts for the long groups
    the end times form a ramp: group g of G ends at (g + 1) / G of the last group's time. The ramp
    with the least such time is searched.

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


def _rollouts_needed(
    times: NDArray[np.float64], deadlines: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Returns the fewest rollouts per group that end it by its deadline; one more than there are if
    all of them together do not.
    """
    late: NDArray[np.int64] = (times > deadlines[:, None] * ROUNDING).sum(axis=1)
    return late + 1


@dataclass(frozen=True, slots=True)
class RolloutSpeed:
    """Names a rollout and its measured speed, in any unit."""

    rollout: str
    speed: float = 1.0
    preemptible: bool = False


@dataclass(frozen=True, slots=True)
class WaveLayout:
    """Names the rollouts of each ranking group, shortest first; `means` are the wave's expected
    lengths, sorted.
    """

    means: tuple[float, ...]
    groups: tuple[tuple[str, ...], ...]

    def near(self, mean: float) -> Iterator[tuple[str, ...]]:
        """Yields the rollouts of the ranking group of this length, then those of its neighbours."""
        count = len(self.groups)
        rank = bisect_left(self.means, mean) / len(self.means)
        own = min(count - 1, int(rank * count))
        yield self.groups[own]
        for away in range(1, count):
            if own + away < count:
                yield self.groups[own + away]
            if own >= away:
                yield self.groups[own - away]


def lay_out_wave(
    means: Sequence[float],
    workers: Sequence[RolloutSpeed],
    ascending: bool,
    samples: int,
    slots: int,
) -> WaveLayout | None:
    """Returns the layout of a wave's prompts with one ranking group for every two rollouts; None
    where a ranking is useless: too few rollouts, or all lengths equal.

    The ranking is HistoPipe (RhymeRL, arXiv 2508.18588): the wave's prompts are ranked by expected
    length and cut into ranking groups. Consecutive waves assign the groups to the rollouts in
    opposite directions (`ascending`), so a rollout with the short end of one wave has the long end
    of the next, without a barrier in between. Preemptible rollouts keep the short end in every
    wave, so that little is lost when one is taken away.
    """
    ranked = tuple(sorted(means))
    count = min((len(workers) + 1) // 2, len(ranked))
    if count < 2 or ranked[0] == ranked[-1]:
        return None
    longest = [ranked[(g + 1) * len(ranked) // count - 1] for g in range(count)]
    answers = max(1, len(ranked) * samples // count)
    shares = share_out(end_times(longest, answers, len(workers), lambda b: 1.0 + b / slots))
    return WaveLayout(ranked, _split_by_shares(shares, _rollouts_in_order(workers, ascending)))


def _rollouts_in_order(workers: Sequence[RolloutSpeed], ascending: bool) -> list[RolloutSpeed]:
    steady = sorted((w for w in workers if not w.preemptible), key=lambda w: w.rollout)
    preemptible = sorted((w for w in workers if w.preemptible), key=lambda w: w.rollout)
    return preemptible + (steady if ascending else steady[::-1])


def _split_by_shares(
    shares: Sequence[int], workers: Sequence[RolloutSpeed]
) -> tuple[tuple[str, ...], ...]:
    """Cut the rollouts into one range per share. A share counts rollouts of mean speed: a range has
    fewer fast or more slow ones, and leaves at least one rollout for each later range.
    """
    mean = sum(w.speed for w in workers) / len(workers)
    groups: list[tuple[str, ...]] = []
    at, wanted, given = 0, 0.0, 0.0
    for index, share in enumerate(shares):
        begin, wanted = at, wanted + share * mean
        most = len(workers) - (len(shares) - index - 1)
        while at < most and (at == begin or given + workers[at].speed / 2 <= wanted):
            given += workers[at].speed
            at += 1
        groups.append(tuple(w.rollout for w in workers[begin:at]))
    rest = tuple(w.rollout for w in workers[at:])
    return (*groups[:-1], groups[-1] + rest)


@dataclass(frozen=True, slots=True)
class PlacementWork:
    """Holds samples of one group that may run together. `mean` is the expected length of each in
    tokens, 0 when unknown; `is_short` is True if it is in the shorter half of the known lengths.
    """

    trajectories: tuple[str, ...]
    mean: float = 0.0
    is_short: bool = False
    layout: WaveLayout | None = None


@dataclass(frozen=True, slots=True)
class RolloutRoom:
    """States the room of one live rollout: slots plus queue, less its unfinished assignments;
    `tokens` are those still expected of them.
    """

    rollout: str
    free: int
    tokens: float = 0.0
    speed: float = 1.0
    preemptible: bool = False


@dataclass(slots=True)
class _RolloutFill:
    room: RolloutRoom
    free: int
    busy: float
    """Expected tokens divided by speed: the time at which the rollout would finish its work."""


def place_samples(
    works: Sequence[PlacementWork], rooms: Sequence[RolloutRoom]
) -> Mapping[str, str]:
    """Returns trajectory → rollout for as many trajectories as fit, in the order of `works`.

    A group's samples go to one rollout while they fit, so that its prompt is prefilled once. Where
    the wave is ranked, the rollouts of the group's ranking group come first. Otherwise the rollout
    comes first that would finish its present work first, or, while no lengths are known, the one
    with most room. Never gives a rollout more than its `free`; ties go to the smaller name, so
    equal inputs give equal plans.
    """
    open_ = {r.rollout: _RolloutFill(r, r.free, r.tokens / r.speed) for r in rooms if r.free > 0}
    plan: dict[str, str] = {}
    for work in works:
        rest = list(work.trajectories)
        while rest and open_:
            chosen = _choose(work, len(rest), open_)
            fitting = rest[: chosen.free]
            plan.update(dict.fromkeys(fitting, chosen.room.rollout))
            rest = rest[len(fitting) :]
            chosen.free -= len(fitting)
            chosen.busy += work.mean * len(fitting) / chosen.room.speed
            if chosen.free == 0:
                del open_[chosen.room.rollout]
        if not open_:
            break
    return plan


def _choose(work: PlacementWork, count: int, open_: Mapping[str, _RolloutFill]) -> _RolloutFill:
    if work.layout is not None:
        for tier in work.layout.near(work.mean):
            if found := [open_[name] for name in tier if name in open_]:
                return _best(work, count, found)
    return _best(work, count, open_.values())


def _best(work: PlacementWork, count: int, candidates: Iterable[_RolloutFill]) -> _RolloutFill:
    """Returns the rollout that finishes first. Long work avoids preemptible rollouts while another
    has room.
    """

    def cost(one: _RolloutFill) -> tuple[bool, bool, float, int, str]:
        is_risk = one.room.preemptible and not work.is_short
        return is_risk, one.free < count, one.busy, -one.free, one.room.rollout

    return min(candidates, key=cost)
