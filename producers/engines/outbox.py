"""What every engine has said and not handed out yet."""

from producers.engines.base import Emission


def take_back(outbox: list[Emission], trajectory: str) -> Emission | None:
    """What is unsaid of a trajectory that is aborted; it leaves the outbox.

    At most one is unsaid: `poll` hands out everything, and only an update in between adds to the
    outbox.
    """
    unsaid = [emission for emission in outbox if emission.trajectory == trajectory]
    outbox[:] = [emission for emission in outbox if emission.trajectory != trajectory]
    return unsaid[-1] if unsaid else None
