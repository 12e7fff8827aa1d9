"""Recovery: which open trajectories no rollout generates, and how each continues. Pure (invariant
9).

It is level-triggered: an open trajectory without an assignment that is held by a living rollout of
the assigned term is assigned again, whatever the cause: it was never assigned (dispatch died after
admitting), its rollout died, restarted under a new term, or released it for a move or before
leaving. So one rule serves admission, recovery, moves and a new holder of dispatch's lease.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState, PartialChain
from rollstream.streams.values import Address, Version


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a trajectory continues under its next attempt. `again`: generated tokens are
    discarded.
    """

    kind: Literal["start", "resume"]
    attempt: int
    partial: Address | None
    version: Version | None
    moves: int
    again: bool


def unassigned_trajectories(state: DispatchState) -> list[list[str]]:
    """Open trajectories that no living rollout holds, by group, oldest wave first."""
    held = {t for t, o in state.orders.items() if not o.given_up and state.is_held(o)}
    found = [
        (group.admitted.wave, number, lost)
        for number, group in state.groups.items()
        if (lost := [t for t in group.admitted.trajectories if t in group.open and t not in held])
    ]
    return [lost for _, _, lost in sorted(found)]


def continuation(
    order: CurrentAssignment | None,
    chain: PartialChain | None,
    keep_version: bool,
    held: Collection[Version],
) -> Continuation:
    """Resume from the newest partial; under `keep_version` only if a rollout holds its version
    (invariant 4).

    If none does, the trajectory restarts on the newest version, unless it is cheaper that an idle
    rollout loads the old version from history (decided by the caller).
    """
    attempt = 1 if order is None else order.attempt + 1
    moves = 0 if order is None else order.moves + 1
    if chain is None:  # without a first token a released trajectory discards nothing
        again = order is not None and not order.given_up
        return Continuation("start", attempt, None, None, moves, again)
    if keep_version and chain.version not in held:
        return Continuation("start", attempt, None, None, moves, again=True)
    exact = chain.version if keep_version else None
    return Continuation("resume", attempt, chain.at, exact, moves, again=False)


def rollouts_holding(versions: Mapping[str, Version], needed: Version | None) -> set[str]:
    """Rollouts that may take a resume that needs exactly this version; all of them when None."""
    return {name for name, version in versions.items() if needed is None or version == needed}
