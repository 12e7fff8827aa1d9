"""Decides when a rollout takes new weights, and how many new trajectories it may still start. Pure
(invariant 9).

`in_flight` policies (PipelineRL, AReaL) take the newest version as soon as it is fetched.
`keep_version` (Laminar, arXiv 2510.12633) finishes running trajectories under their version: the
rollout starts a quota of new trajectories; once the quota is used and a newer version exists, it
only finishes, and pulls when it is empty.
"""

from dataclasses import dataclass

from rollstream.producers.engines.base import UpdateMode


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """Inputs of the rules: version numbers held and announced, new trajectories drawn under the
    held version, their quota, trajectories in progress, and the version number that the next
    waiting assignment needs.
    """

    held: int
    newest: int
    drawn: int
    quota: int
    busy: int
    needed: int


def may_draw(mode: UpdateMode, load: UpdateInputs) -> bool:
    """Whether the next waiting assignment may start under the held version."""
    if load.needed > load.held:
        return False
    return mode != "keep_version" or load.newest <= load.held or load.drawn < load.quota


def wants_update(mode: UpdateMode, load: UpdateInputs) -> bool:
    """Whether to take the newest version now; under `keep_version` only an empty engine does."""
    if load.newest <= load.held:
        return False
    return mode != "keep_version" or load.busy == 0


def quota_left(mode: UpdateMode, load: UpdateInputs) -> int:
    """New trajectories that the rollout may start before it drains."""
    return load.quota if mode != "keep_version" else max(0, load.quota - load.drawn)


def is_draining(mode: UpdateMode, load: UpdateInputs) -> bool:
    """Whether the rollout starts nothing new until it is empty and has pulled."""
    stale = mode == "keep_version" and load.newest > load.held
    return stale and (load.drawn >= load.quota or load.needed > load.held)


def drawn_from_history(load: UpdateInputs, resumed: int) -> int:
    """What counts as drawn under a version that was reloaded for `resumed` trajectories. The
    rollout continues like the one that held the version; if the version is more than one behind, it
    starts nothing new.
    """
    return resumed if load.newest <= load.held + 1 else max(resumed, load.quota)
