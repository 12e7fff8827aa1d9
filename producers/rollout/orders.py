"""The orders of one rollout: read from its partition of `assignments`, kept in order until the
engine has room.

A rollout obeys only orders of its own name and term: after a restart it takes nothing up again
without a new attempt from dispatch, because its new term is in no old order.
"""

import logging
from collections import deque

from streams.bus import Bus
from streams.errors import PositionLost
from streams.reader import Received, TopicReader, from_begin
from streams.records import Assignment
from streams.topics import partition_of

log = logging.getLogger(__name__)


class Orders:
    """Waiting orders, oldest first, and what was released meanwhile."""

    def __init__(self, bus: Bus, rollout: str, term: int) -> None:
        """Reads its partition from what is kept on, although no order of this term lies there yet:
        only who read the `Opened` records can tell the orders of a zombie dispatch from those of
        its successor (invariant 7).
        """
        self._rollout, self._term = rollout, term
        partition = partition_of(rollout.encode(), bus.partitions("assignments"))
        self._bus, self._partition = bus, partition
        self._reader = self._from_begin()
        self.waiting: deque[Assignment] = deque()

    def readers(self) -> list[TopicReader]:
        return [self._reader]

    def read(self) -> list[Assignment]:
        """Queue what came; returns the releases."""
        released: list[Assignment] = []
        for received in self._poll():
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

    def _poll(self) -> list[Received]:
        """Orders truncated before they were read are of trajectories that have ended: dispatch
        keeps those of open ones (invariant 11).
        """
        try:
            return self._reader.follow()
        except PositionLost as lost:
            log.info("orders of ended trajectories were truncated unread: %s", lost)
            self._reader = self._from_begin()
            return self._reader.follow()

    def _from_begin(self) -> TopicReader:
        begin = from_begin(self._bus, "assignments")[self._partition]
        return TopicReader(self._bus, "assignments", {self._partition: begin})

    def _drop(self, trajectory: str) -> None:
        if any(order.trajectory == trajectory for order in self.waiting):
            self.waiting = deque(o for o in self.waiting if o.trajectory != trajectory)
