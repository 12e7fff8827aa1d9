"""Decides whether a version that no rollout holds any more is loaded from history for its
unfinished trajectories, or whether they restart on the newest version: the cheaper one (invariant
4). Pure (invariant 9).

Costs are counted in tokens that one slot could have generated, in two parts. Work used up: the
tokens that are generated again, against the slots that are empty while the version is loaded and,
on a rollout that gets no new work under it, until its last trajectory ends. Work delayed: the tail
ends later by the load, or by the tokens that are generated again; a wave waits for its last
trajectory, so that delay costs all slots of one rollout. Used slots cost nothing where no other
work needs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnheldTrajectory:
    """A trajectory whose version no rollout holds: the tokens generated so far and those still
    expected.
    """

    trajectory: str
    gained: int
    left: float


@dataclass(frozen=True, slots=True)
class IdleRollout:
    """A rollout that would load the version: `load_s` seconds for its bytes, `speed` tokens per
    second of one slot. `is_wanted`: other work needs its slots. Without `refills` it gets no new
    trajectories under that version.
    """

    slots: int
    load_s: float
    speed: float
    is_wanted: bool
    refills: bool


def trajectories_to_reload(behind: Sequence[UnheldTrajectory], emptied: IdleRollout) -> tuple[str, ...]:
    """The trajectories to load their version for, at most one per slot; empty when it is cheaper
    that all restart. The others restart.

    Slots are empty until the longest one ends, so only the choices of the n trajectories with the
    fewest expected tokens are compared; where no slot stays empty, those of the n with the most
    generated tokens.
    """

    def turn(one: UnheldTrajectory) -> tuple[float, int, str]:
        return 0.0 if emptied.refills else one.left, -one.gained, one.trajectory

    ordered = sorted(behind, key=turn)
    choices = range(min(len(ordered), emptied.slots) + 1)
    best = min(choices, key=lambda n: (reload_cost(ordered[:n], ordered[n:], emptied), -n))
    return tuple(sorted(one.trajectory for one in ordered[:best]))


def reload_cost(loaded: Sequence[UnheldTrajectory], again: Sequence[UnheldTrajectory], emptied: IdleRollout) -> float:
    """Cost of loading the version for `loaded` and restarting `again`."""
    used = float(sum(one.gained for one in again))
    waited = float(max((one.gained for one in again), default=0))
    if loaded:
        load = emptied.load_s * emptied.speed
        used += emptied.slots * 2 * load  # to the old version, and back to the newest
        if not emptied.refills:
            used += emptied.slots * max(one.left for one in loaded)
            used -= sum(one.left for one in loaded)
        waited = max(waited, load)
    return used * emptied.is_wanted + emptied.slots * waited
