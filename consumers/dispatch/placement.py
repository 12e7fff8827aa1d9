"""Decides which rollout gets which samples, by pure functions (invariant 9;
docs/explanation/scheduling.md).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1 + 1e-9  # an end time that is later by rounding still meets its deadline


def end_times(
    longest: Sequence[float], samples: int, workers: int, step: Callable[[float], float]
) -> NDArray[np.float64]:
    """Returns an array whose element [g, n − 1] is the time after which ranking group g, of
    `samples` answers, the longest of `longest[g]` tokens, ends on n rollouts; `step(batch)` is the
    time of one decode step.
    """
    steps = [step(samples / n) for n in range(1, workers + 1)]
    return np.outer(np.asarray(longest, np.float64), steps)


def share_out(times: NDArray[np.float64]) -> tuple[int, ...]:
    """Returns the number of rollouts for each ranking group, shortest answers first, at least one;
    all are used. `times[g, n − 1]` must not grow with n; no more groups than rollouts.
    """
    groups, workers = times.shape
    assert 0 < groups <= workers, f"{groups} ranking groups for {workers} rollouts"
    # With equal numbers the end times would grow like the lengths, steeply at the end. The end
    # times stay below a linear ramp: group g of G (g from 0) ends at (g + 1) / G of the last
    # group's time. Of all such ramps the one is taken under which the last group ends first.
    ramp: NDArray[np.float64] = np.arange(1, groups + 1, dtype=np.float64) / float(groups)
    targets: NDArray[np.float64] = np.unique(times / ramp[:, None])
    low, high = 0, len(targets) - 1
    while low < high:
        middle = (low + high) // 2
        if _rollouts_needed(times, ramp * targets[middle]).sum() <= workers:
            high = middle
        else:
            low = middle + 1
    counts = _rollouts_needed(times, ramp * targets[low])
    if counts.sum() > workers:  # no ramp is possible: one each, the others to the longest group
        counts = np.ones(groups, np.int64)
    counts[-1] += workers - counts.sum()
    return tuple(int(n) for n in counts)


def _rollouts_needed(
    times: NDArray[np.float64], deadlines: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The smallest number of rollouts that end each group by its deadline; one more than exist if
    all are too late.
    """
    late: NDArray[np.int64] = (times > deadlines[:, None] * ROUNDING).sum(axis=1)
    return late + 1


@dataclass(frozen=True, slots=True)
class RolloutSpeed:
    """`speed` in any unit. `preemptible`: the machine may be taken away at any moment. `kind`
    orders machines by speed, 0 is the slowest.
    """

    rollout: str
    speed: float = 1.0
    preemptible: bool = False
    kind: int = 0
    slots: int = 1


@dataclass(frozen=True, slots=True)
class WaveLayout:
    """The rollouts of each ranking group of one wave, shortest answers first. `means` are the
    sorted expected lengths of the wave's prompts, among which a length's place selects its group.

    Where rollouts are of unlike kinds, group g has the prompts up to place `ends[g]`, and rollouts
    of kind `kinds[g]`; else groups have equal numbers of prompts. At most `held_max` samples wait
    for rollouts of their own kind or a faster one.
    """

    means: tuple[float, ...]
    groups: tuple[tuple[str, ...], ...]
    ends: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    held_max: int = 0

    def near(self, mean: float) -> Iterator[tuple[str, ...]]:
        """Yields the rollouts of the length's ranking group, then of other groups of its kind, then
        of faster ones, the nearest first.
        """
        own_group = self._group_of(mean)
        order = sorted(range(len(self.groups)), key=lambda g: (abs(g - own_group), -g))
        yield from (self.groups[g] for g in order if self._kind(g) == self._kind(own_group))
        yield from (self.groups[g] for g in order if self._kind(g) > self._kind(own_group))

    def slower(self, mean: float) -> Iterator[tuple[str, ...]]:
        """Yields the rollouts of slower kinds, the fastest first."""
        own_kind = self._kind(self._group_of(mean))
        for kind, group in reversed(list(zip(self.kinds, self.groups, strict=True))):
            if kind < own_kind:
                yield group

    def _group_of(self, mean: float) -> int:
        count, place = len(self.groups), bisect_left(self.means, mean)
        if not self.ends:
            return min(count - 1, int(place / len(self.means) * count))
        return min(count - 1, bisect_right(self.ends, place))

    def _kind(self, group: int) -> int:
        return self.kinds[group] if self.kinds else 0


def lay_out_wave(
    means: Sequence[float],
    workers: Sequence[RolloutSpeed],
    ascending: bool,
    samples: int,
    slots: int,
    is_ranked: bool = True,
    per_group: int = 2,
) -> WaveLayout | None:
    """Returns one ranking group for every `per_group` rollouts; None where a ranking is useless:
    one group or prompt, or all lengths equal. `means` are expected lengths, each prompt has
    `samples` samples, a rollout `slots` slots. Rollouts of unlike kinds are first divided by kind;
    with `is_ranked` False that is all.

    The ranking is HistoPipe (RhymeRL, arXiv 2508.18588): consecutive waves give the groups to the
    rollouts in opposite directions (`ascending`), without a barrier in between.
    """
    ranked = tuple(sorted(means))
    if len({worker.kind for worker in workers}) > 1:
        return _lay_out_kinds(ranked, workers, ascending, samples, slots, is_ranked, per_group)
    count = min(-(-len(workers) // per_group), len(ranked))
    if not is_ranked or count < 2 or ranked[0] == ranked[-1]:
        return None
    longest = [ranked[(g + 1) * len(ranked) // count - 1] for g in range(count)]
    answers = max(1, len(ranked) * samples // count)
    # Assumed: a step with all slots in use takes twice as long as a step with nearly none.
    shares = share_out(end_times(longest, answers, len(workers), lambda b: 1.0 + b / slots))
    return WaveLayout(ranked, _split_by_shares(shares, _rollouts_in_order(workers, ascending)))


def _lay_out_kinds(
    ranked: tuple[float, ...],
    workers: Sequence[RolloutSpeed],
    ascending: bool,
    samples: int,
    slots: int,
    is_ranked: bool,
    per_group: int,
) -> WaveLayout | None:
    if len(ranked) < 2 or ranked[0] == ranked[-1]:
        return None
    tokens = list(accumulate(ranked))
    capacity = sum(worker.speed * worker.slots for worker in workers)
    groups: list[tuple[str, ...]] = []
    ends: list[int] = []
    kinds: list[int] = []
    begin, capacity_used = 0, 0.0
    order = sorted({worker.kind for worker in workers})
    # The slowest kind gets the shortest answers of every wave: a long answer on a slow rollout
    # delays its group and the step, and is dropped where it exceeds the lag bound. Each kind gets
    # the share of the wave's tokens that it generates (slots × speed), so all kinds end together.
    for kind in order:
        members = [worker for worker in workers if worker.kind == kind]
        capacity_used += sum(worker.speed * worker.slots for worker in members)
        is_last = kind == order[-1]
        end = len(ranked) if is_last else bisect_left(tokens, capacity_used / capacity * tokens[-1])
        part = ranked[begin:end]
        inner = None
        if is_ranked:
            inner = lay_out_wave(part, members, ascending, samples, slots, per_group=per_group)
        parts = (tuple(worker.rollout for worker in members),) if inner is None else inner.groups
        ends += [begin + (g + 1) * len(part) // len(parts) for g in range(len(parts))]
        kinds += [kind] * len(parts)
        groups += parts
        begin = end
    return WaveLayout(ranked, tuple(groups), tuple(ends), tuple(kinds), held_max(workers))


def held_max(workers: Sequence[RolloutSpeed]) -> int:
    """Returns how many samples may wait for fast rollouts: as many as the faster kinds run
    together.
    """
    slowest = min((worker.kind for worker in workers), default=0)
    return sum(worker.slots for worker in workers if worker.kind > slowest)


def _rollouts_in_order(workers: Sequence[RolloutSpeed], ascending: bool) -> list[RolloutSpeed]:
    steady = sorted((w for w in workers if not w.preemptible), key=lambda w: w.rollout)
    preemptible = sorted((w for w in workers if w.preemptible), key=lambda w: w.rollout)
    # Preemptible rollouts get the shortest answers of every wave, so a preemption loses little.
    return preemptible + (steady if ascending else steady[::-1])


def _split_by_shares(
    shares: Sequence[int], workers: Sequence[RolloutSpeed]
) -> tuple[tuple[str, ...], ...]:
    # A share is a number of rollouts of mean speed: a range has fewer rollouts if they are fast.
    mean = sum(w.speed for w in workers) / len(workers)
    groups: list[tuple[str, ...]] = []
    at, speed_due, speed_used = 0, 0.0, 0.0
    for index, share in enumerate(shares):
        begin, speed_due = at, speed_due + share * mean
        end_max = len(workers) - (len(shares) - index - 1)
        while at < end_max and (at == begin or speed_used + workers[at].speed / 2 <= speed_due):
            speed_used += workers[at].speed
            at += 1
        groups.append(tuple(w.rollout for w in workers[begin:at]))
    rest = tuple(w.rollout for w in workers[at:])
    return (*groups[:-1], groups[-1] + rest)


@dataclass(frozen=True, slots=True)
class PlacementWork:
    """Samples of one prompt that may run together. `mean` is the expected length of each in tokens,
    0 if unknown; `is_short`: in the shorter half of the known ones. `is_urgent`: they resume, so
    others of their group are ahead.
    """

    trajectories: tuple[str, ...]
    mean: float = 0.0
    is_short: bool = False
    layout: WaveLayout | None = None
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class RolloutRoom:
    """Room for `free` more samples, in slots and queue; `tokens` is the expected number still to
    generate.
    """

    rollout: str
    free: int
    tokens: float = 0.0
    speed: float = 1.0
    preemptible: bool = False
    kind: int = 0


@dataclass(slots=True)
class _RolloutFill:
    room: RolloutRoom
    free: int
    busy: float


def place_samples(
    works: Sequence[PlacementWork], rooms: Sequence[RolloutRoom]
) -> Mapping[str, str]:
    """Returns the rollout of each trajectory, for as many as fit, in the order of `works`. Never
    gives a rollout more than its `free`; equal inputs give equal plans.

    Candidates are the rollouts of the samples' ranking group, or of the nearest one with room;
    without a layout, all rollouts. Preferred is, by these rules in turn, a rollout that
    1. is not preemptible, unless the samples are short;
    2. is of the fastest kind, if the samples are urgent;
    3. has room for all remaining samples of the prompt, which is then prefilled only once;
    4. would be the first to finish its present work;
    5. has the most room;
    6. has the smaller name.

    Up to `WaveLayout.held_max` samples are held back rather than placed on a slower kind than their
    own; of more, the shortest are placed there.
    """
    open_ = {r.rollout: _RolloutFill(r, r.free, r.tokens / r.speed) for r in rooms if r.free > 0}
    plan: dict[str, str] = {}
    held_back: list[PlacementWork] = []
    for work in works:
        if not open_:
            return plan
        tiers = None if work.layout is None else work.layout.near(work.mean)
        rest = _place(work, work.trajectories, tiers, open_, plan)
        if rest:
            held_back.append(replace(work, trajectories=rest))
    waiting = sum(len(work.trajectories) for work in held_back)
    for work in sorted(held_back, key=lambda work: work.mean):
        if work.layout is None or not open_ or waiting <= work.layout.held_max:
            break
        some = work.trajectories[: waiting - work.layout.held_max]
        rest = _place(work, some, work.layout.slower(work.mean), open_, plan)
        waiting -= len(some) - len(rest)
    return plan


def _place(
    work: PlacementWork,
    trajectories: tuple[str, ...],
    tiers: Iterable[tuple[str, ...]] | None,
    open_: dict[str, _RolloutFill],
    plan: dict[str, str],
) -> tuple[str, ...]:
    """Adds to the plan, in the first of `tiers` with room first; None: all rollouts. Returns the
    remaining trajectories.
    """
    order = None if tiers is None else list(tiers)
    rest = trajectories
    while rest and (candidates := _with_room(order, open_)):
        chosen = _best(work, len(rest), candidates)
        fitting, rest = rest[: chosen.free], rest[chosen.free :]
        plan.update(dict.fromkeys(fitting, chosen.room.rollout))
        chosen.free -= len(fitting)
        chosen.busy += work.mean * len(fitting) / chosen.room.speed
        if chosen.free == 0:
            del open_[chosen.room.rollout]
    return rest


def _with_room(
    tiers: Sequence[tuple[str, ...]] | None, open_: Mapping[str, _RolloutFill]
) -> list[_RolloutFill]:
    if tiers is None:
        return list(open_.values())
    for tier in tiers:
        if fills := [open_[name] for name in tier if name in open_]:
            return fills
    return []


def _best(work: PlacementWork, count: int, candidates: Iterable[_RolloutFill]) -> _RolloutFill:
    def cost(fill: _RolloutFill) -> tuple[bool, int, bool, float, int, str]:
        is_risk = fill.room.preemptible and not work.is_short
        slowness = -fill.room.kind if work.is_urgent else 0
        return is_risk, slowness, fill.free < count, fill.busy, -fill.free, fill.room.rollout

    return min(candidates, key=cost)
