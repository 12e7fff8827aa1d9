"""The orders of one rollout: read from its partition of `assignments`, kept in order until the
engine has room.

A rollout obeys only orders of its own name and term: after a restart it takes nothing up again
without a new attempt from dispatch, because its new term is in no old order.
"""

from collections import deque

from streams.bus import Bus
from streams.reader import TopicReader
from streams.records import Assignment, Position
from streams.topics import partition_of


class Orders:
    """Waiting orders, oldest first, and what was released meanwhile."""

    def __init__(self, bus: Bus, rollout: str, term: int) -> None:
        """Reads its partition from what is kept on, although no order of this term lies there yet:
        only who read the `Opened` records can tell the orders of a zombie dispatch from those of
        its successor (invariant 7).
        """
        self._rollout, self._term = rollout, term
        partition = partition_of(rollout.encode(), bus.partitions("assignments"))
        begin = bus.begin("assignments")[partition]
        self._reader = TopicReader(bus, "assignments", {partition: Position(begin)})
        self.waiting: deque[Assignment] = deque()

    def read(self) -> list[Assignment]:
        """Queue what came; returns the releases."""
        released: list[Assignment] = []
        for received in self._reader.poll(0.0):
            record = received.record
            if not isinstance(record, Assignment):
                continue
            if (record.rollout, record.rollout_term) != (self._rollout, self._term):
                continue
            if record.kind == "release":
                released.append(record)
                self._drop(record.trajectory)
            else:
                self.waiting.append(record)
        return released

    def _drop(self, trajectory: str) -> None:
        if any(order.trajectory == trajectory for order in self.waiting):
            self.waiting = deque(o for o in self.waiting if o.trajectory != trajectory)
