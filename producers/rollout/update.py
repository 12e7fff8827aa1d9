"""When a rollout takes new weights, and how many new trajectories it may still draw. Pure
(invariant 9).

`in_flight` policies (PipelineRL, AReaL) take the newest version as soon as it is fetched.
`keep_version` (Laminar, arXiv 2510.12633) finishes what runs under its version: it draws a quota of
new trajectories, and once that is drawn and a newer version is out it only finishes, until it is
empty and pulls.
"""

from dataclasses import dataclass

from producers.engines.base import UpdateMode


@dataclass(frozen=True, slots=True)
class Load:
    """What the rule looks at. `needed` is the version number that the next waiting
    order asks for.
    """

    held: int
    newest: int
    drawn: int
    quota: int
    busy: int
    needed: int


def may_draw(mode: UpdateMode, load: Load) -> bool:
    """Whether the next waiting order may start under the held version."""
    if load.needed > load.held:
        return False
    return mode != "keep_version" or load.newest <= load.held or load.drawn < load.quota


def wants_update(mode: UpdateMode, load: Load) -> bool:
    """Whether the newest version should be taken now; under `keep_version` only an empty engine
    takes it.
    """
    if load.newest <= load.held:
        return False
    return mode != "keep_version" or load.busy == 0


def quota_left(mode: UpdateMode, load: Load) -> int:
    """New trajectories that it would still draw before it drains."""
    return load.quota if mode != "keep_version" else max(0, load.quota - load.drawn)


def is_draining(mode: UpdateMode, load: Load) -> bool:
    """It takes nothing new until it is empty and has pulled."""
    stale = mode == "keep_version" and load.newest > load.held
    return stale and (load.drawn >= load.quota or load.needed > load.held)


def drawn_from_history(load: Load, resumed: int) -> int:
    """What counts as drawn of a version loaded from history for `resumed` trajectories: it goes on
    as the rollout that held it, but where it is more than one behind it takes nothing new.
    """
    return resumed if load.newest <= load.held + 1 else max(resumed, load.quota)
