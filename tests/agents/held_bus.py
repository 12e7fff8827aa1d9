"""A bus whose appends to one topic wait, for tests of what happens meanwhile."""

import threading
from typing import Any

from rollstream.errors import BusError
from rollstream.streams.bus import Bus
from testbed.waiting import WAIT_S


class HeldBus:
    """Passes on to a bus; appends to `topic` wait until they are let go."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus, self._topic = bus, topic
        self.go, self._is_killed = threading.Event(), False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def append(self, topic: str, entries: Any) -> Any:
        if topic == self._topic:
            assert self.go.wait(WAIT_S)
            if self._is_killed:
                raise BusError("its rollout was killed")
        return self._bus.append(topic, entries)

    def kill(self) -> None:
        """Ends what waits: nothing is appended, and no thread outlives the test."""
        self._is_killed = True
        self.go.set()
