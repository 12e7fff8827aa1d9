"""Placement: which rollout gets which samples. Pure (invariant 9).

A group's samples go to one rollout while they fit, so that its prompt is prefilled once. Where the
wave is ranked (`layout.py`) the rollouts of its ranking group come first; else the one that would
be done first with what it was given, and while nothing is known of lengths the one with most room.
Nobody waits for a better place: a free slot anywhere is taken.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from consumers.dispatch.layout import Layout


@dataclass(frozen=True, slots=True)
class Work:
    """Samples of one group that may run together; `mean` is the expected length of each, 0 when
    unknown, and `is_short` that it is among the shorter half of what is known.
    """

    trajectories: tuple[str, ...]
    mean: float = 0.0
    is_short: bool = False
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What one live rollout can still be given: slots plus queue, less what it was given and did
    not finish; `tokens` are those expected of what it has.
    """

    rollout: str
    free: int
    tokens: float = 0.0
    speed: float = 1.0
    preemptible: bool = False


@dataclass(slots=True)
class _Filling:
    room: Room
    free: int
    busy: float
    """Expected tokens by speed: when it would be done."""


def place(works: Sequence[Work], rooms: Sequence[Room]) -> Mapping[str, str]:
    """Trajectory → rollout for as many trajectories as fit, in the order of `works`.

    Never gives a rollout more than its `free`; ties go to the smaller name, so equal inputs give
    equal plans.
    """
    open_ = {r.rollout: _Filling(r, r.free, r.tokens / r.speed) for r in rooms if r.free > 0}
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


def _choose(work: Work, count: int, open_: Mapping[str, _Filling]) -> _Filling:
    if work.layout is not None:
        for tier in work.layout.near(work.mean):
            if found := [open_[name] for name in tier if name in open_]:
                return _best(work, count, found)
    return _best(work, count, open_.values())


def _best(work: Work, count: int, fillings: Iterable[_Filling]) -> _Filling:
    """Long work keeps off rollouts that may go at any moment while another has room."""

    def cost(one: _Filling) -> tuple[bool, bool, float, int, str]:
        is_risk = one.room.preemptible and not work.is_short
        return is_risk, one.free < count, one.busy, -one.free, one.room.rollout

    return min(fillings, key=cost)
