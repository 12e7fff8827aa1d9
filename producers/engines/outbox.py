"""Emissions that an engine has made and `poll` has not returned yet."""

from rollstream.producers.engines.base import Emission


def take_back(outbox: list[Emission], trajectory: str) -> Emission | None:
    """Remove and return the emission of an aborted trajectory that `poll` has not returned.

    There is at most one: `poll` empties the outbox, and between two polls only an update adds to
    it.
    """
    unsaid = [emission for emission in outbox if emission.trajectory == trajectory]
    outbox[:] = [emission for emission in outbox if emission.trajectory != trajectory]
    return unsaid[-1] if unsaid else None
