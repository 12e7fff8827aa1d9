"""Whether a version that nobody holds any more is loaded from history for the trajectories that it
left behind, or they start again on the newest: whichever is cheaper (invariant 4). Pure
(invariant 9).

Costs are counted in tokens that one slot could have generated. What is used up: all that is
generated again, against the slots that stand empty while the version is loaded and, where it gets
nothing new, while its last trajectory ends. What is waited for: the tail that comes later, by the
load or by the tokens that are generated again; a wave waits for its last, so that time costs one
rollout's slots. Used slots cost nothing where no other work wants them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Behind:
    """A trajectory whose version nobody holds: tokens gained, and those expected still."""

    trajectory: str
    gained: int
    left: float


@dataclass(frozen=True, slots=True)
class Emptied:
    """A rollout that would load the version: `load_s` seconds for its bytes, `speed` tokens per
    second of one slot. Without `refills` it gets nothing new under that version.
    """

    slots: int
    load_s: float
    speed: float
    is_wanted: bool
    refills: bool


def worth_loading(behind: Sequence[Behind], emptied: Emptied) -> tuple[str, ...]:
    """The trajectories to load their version for, as many as have a slot; empty when it is cheaper
    that all start again. The others start again.

    Slots stand empty as long as the longest takes, so of all choices those with the least left to
    do are enough to look at; where none stands empty, those that gained most.
    """

    def turn(one: Behind) -> tuple[float, int, str]:
        return 0.0 if emptied.refills else one.left, -one.gained, one.trajectory

    ordered = sorted(behind, key=turn)
    choices = range(min(len(ordered), emptied.slots) + 1)
    best = min(choices, key=lambda n: (cost(ordered[:n], ordered[n:], emptied), -n))
    return tuple(sorted(one.trajectory for one in ordered[:best]))


def cost(loaded: Sequence[Behind], again: Sequence[Behind], emptied: Emptied) -> float:
    """Of loading the version for these, and starting those again."""
    used = float(sum(one.gained for one in again))
    waited = float(max((one.gained for one in again), default=0))
    if loaded:
        load = emptied.load_s * emptied.speed
        used += emptied.slots * 2 * load  # there, and back to the newest
        if not emptied.refills:
            used += emptied.slots * max(one.left for one in loaded)
            used -= sum(one.left for one in loaded)
        waited = max(waited, load)
    return used * emptied.is_wanted + emptied.slots * waited
