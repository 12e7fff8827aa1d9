"""A process that continues behind a fork with the bus of its parent."""

import os

from rollstream.errors import BusError
from rollstream.streams.bus import Bus
from rollstream.streams.topics import Topic


def check_that_a_forked_child_is_refused(bus: Bus) -> None:
    """The error of the child asks for a bus of its own; the parent continues with the bus."""
    bus.create([Topic("t")])
    child = os.fork()
    if child == 0:
        try:
            bus.end("t")
        except BusError as error:
            os._exit(7 if "before a fork" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert bus.end("t") == {0: 0}
    bus.close()
