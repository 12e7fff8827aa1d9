"""A bus whose appends to one topic wait, for tests of what happens meanwhile."""

import threading
from typing import Any

from rollstream.streams.bus import Bus


class HeldBus:
    """Passes on to a bus; appends to `topic` wait until they are let go."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus, self._topic = bus, topic
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def append(self, topic: str, entries: Any) -> Any:
        if topic == self._topic:
            assert self.go.wait(60)
        return self._bus.append(topic, entries)
