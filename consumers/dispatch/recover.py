"""Recovery: which open trajectories nobody generates, and how each goes on. Pure (invariant 9).

It is level-triggered: an open trajectory without an order held by a living rollout of the ordered
term is to be ordered again, whatever happened to it before: never ordered (dispatch died after
admitting), its rollout died, restarted under a new term, or gave it up for a move or because it
leaves. So one rule serves admission, recovery, moves and a new holder of dispatch's lease.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from consumers.dispatch.state import Chain, DispatchState, Order
from streams.records import Address, Version


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a trajectory goes on under its next attempt. `again` counts work that is thrown away."""

    kind: Literal["start", "resume"]
    attempt: int
    partial: Address | None
    version: Version | None
    moves: int
    again: bool


def orphans(state: DispatchState) -> list[list[str]]:
    """Open trajectories that no living rollout holds, by group, oldest wave first."""
    held = {t for t, o in state.orders.items() if not o.given_up and state.is_held(o)}
    found = [
        (group.admitted.wave, number, lost)
        for number, group in state.groups.items()
        if (lost := [t for t in group.admitted.trajectories if t in group.open and t not in held])
    ]
    return [lost for _, _, lost in sorted(found)]


def continuation(
    order: Order | None, chain: Chain | None, keep_version: bool, held: Collection[Version]
) -> Continuation:
    """Resume from the newest partial; under `keep_version` only where somebody holds its version
    (invariant 4).

    When nobody does, it starts again on the newest, unless `stranded.py` finds it cheaper that an
    emptied rollout loads its version from history.
    """
    attempt = 1 if order is None else order.attempt + 1
    moves = 0 if order is None else order.moves + 1
    if chain is None:  # one that was given up before its first token lost nothing
        again = order is not None and not order.given_up
        return Continuation("start", attempt, None, None, moves, again)
    if keep_version and chain.version not in held:
        return Continuation("start", attempt, None, None, moves, again=True)
    exact = chain.version if keep_version else None
    return Continuation("resume", attempt, chain.at, exact, moves, again=False)


def holders(versions: Mapping[str, Version], needed: Version | None) -> set[str]:
    """Rollouts that may take a resume that needs exactly this version; all of them when None."""
    return {name for name, version in versions.items() if needed is None or version == needed}
