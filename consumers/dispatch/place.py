"""Placement, first form: each group to the rollout with most free room. Pure (invariant 9).

A group's samples go to one rollout while they fit, so that its prompt is prefilled once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What one live rollout can still be given: slots plus queue, less what it was given and did
    not finish.
    """

    rollout: str
    free: int


def place(groups: Sequence[Sequence[str]], rooms: Sequence[Room]) -> Mapping[str, str]:
    """Trajectory → rollout for as many trajectories as fit, in the order of `groups`.

    Never gives a rollout more than its `free`; ties go to the smaller name, so equal inputs give
    equal plans.
    """
    free = {room.rollout: room.free for room in rooms if room.free > 0}
    plan: dict[str, str] = {}
    for group in groups:
        rest = list(group)
        while rest and free:
            rollout = min(free, key=lambda name: (-free[name], name))
            fitting = rest[: free[rollout]]
            plan.update(dict.fromkeys(fitting, rollout))
            rest = rest[len(fitting) :]
            free[rollout] -= len(fitting)
            if free[rollout] == 0:
                del free[rollout]
        if not free:
            break
    return plan
