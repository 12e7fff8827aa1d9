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


def may_draw(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Whether the next waiting assignment may start under the held version."""
    if inputs.needed > inputs.held:
        return False
    return mode != "keep_version" or inputs.newest <= inputs.held or inputs.drawn < inputs.quota


def wants_update(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Whether to take the newest version now; under `keep_version` only an empty engine does."""
    if inputs.newest <= inputs.held:
        return False
    return mode != "keep_version" or inputs.busy == 0


def quota_left(mode: UpdateMode, inputs: UpdateInputs) -> int:
    """New trajectories that the rollout may start before it drains."""
    return inputs.quota if mode != "keep_version" else max(0, inputs.quota - inputs.drawn)


def is_draining(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Whether the rollout starts nothing new until it is empty and has pulled."""
    stale = mode == "keep_version" and inputs.newest > inputs.held
    return stale and (inputs.drawn >= inputs.quota or inputs.needed > inputs.held)


def drawn_from_history(inputs: UpdateInputs, resumed: int) -> int:
    """The number of trajectories that count as drawn under an old version that was loaded again to
    resume `resumed` trajectories. If the version is more than one behind, the whole quota counts as
    drawn, so the rollout starts no new trajectory under it.
    """
    return resumed if inputs.newest <= inputs.held + 1 else max(resumed, inputs.quota)
