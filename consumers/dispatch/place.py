"""Placement: which rollout gets which samples. Pure (invariant 9).

A group's samples go to one rollout while they fit, so that its prompt is prefilled once. Where the
wave is ranked, the rollouts of the group's ranking group come first; else the rollout that would
finish its present work first, and while no lengths are known the one with most room. No sample
waits for a better place: a free slot on any rollout is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.consumers.dispatch.placement import WaveLayout


@dataclass(frozen=True, slots=True)
class PlacementWork:
    """Samples of one group that may run together. `mean` is the expected length of each in tokens,
    0 when unknown; `is_short`: it is in the shorter half of the known lengths.
    """

    trajectories: tuple[str, ...]
    mean: float = 0.0
    is_short: bool = False
    layout: WaveLayout | None = None


@dataclass(frozen=True, slots=True)
class RolloutRoom:
    """The room of one live rollout: slots plus queue, less its unfinished assignments; `tokens` are
    those still expected of them.
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
    """Expected tokens divided by speed: when it would finish its work."""


def place_samples(works: Sequence[PlacementWork], rooms: Sequence[RolloutRoom]) -> Mapping[str, str]:
    """Trajectory → rollout for as many trajectories as fit, in the order of `works`.

    Never gives a rollout more than its `free`; ties go to the smaller name, so equal inputs give
    equal plans.
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


def _best(work: PlacementWork, count: int, fillings: Iterable[_RolloutFill]) -> _RolloutFill:
    """The rollout that finishes first. Long work avoids preemptible rollouts while another has
    room.
    """

    def cost(one: _RolloutFill) -> tuple[bool, bool, float, int, str]:
        is_risk = one.room.preemptible and not work.is_short
        return is_risk, one.free < count, one.busy, -one.free, one.room.rollout

    return min(fillings, key=cost)
