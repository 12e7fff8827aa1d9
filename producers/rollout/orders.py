"""The orders of one rollout: read from its partition of `assignments`, kept in order until the
engine has room.

A rollout obeys only orders of its own name and term: after a restart it takes nothing up again
without a new attempt from dispatch, because its new term is in no old order. One that was replaced
while it stood still meets its successor's term here, and exits.
"""

import logging
from collections import deque

from streams.bus import Bus
from streams.errors import Fenced, PositionLost
from streams.reader import Received, TopicReader, from_begin
from streams.records import Assignment
from streams.topics import partition_of

log = logging.getLogger(__name__)


class Orders:
    """Waiting orders, most urgent first, and what was released meanwhile."""

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
        """Queue what came; returns the releases. `Fenced` when a higher term of this name has
        orders.
        """
        released: list[Assignment] = []
        for received in self._poll():
            record = received.record
            if not isinstance(record, Assignment):
                continue
            if record.rollout != self._rollout or record.rollout_term < self._term:
                continue
            if record.rollout_term > self._term:
                raise Fenced(
                    f"rollout {self._rollout} of term {self._term} was replaced in term "
                    f"{record.rollout_term}; this process must exit. If two run on purpose, give "
                    "each a name of its own (--name)"
                )
            if record.kind != "release":
                self.waiting.append(record)
            else:
                released.append(record)
                if not record.onward:
                    self.take(record.trajectory)
        self.waiting = deque(sorted(self.waiting, key=_urgency))
        return released

    def take(self, trajectory: str, attempt: int | None = None) -> Assignment | None:
        """The waiting order for this trajectory, which waits no more; None if there is none of that
        attempt.
        """
        for order in self.waiting:
            if order.trajectory == trajectory and attempt in (None, order.attempt):
                self.waiting.remove(order)
                return order
        return None

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


def _urgency(order: Assignment) -> tuple[bool, int, bool, int]:
    """Resumes first, because their version drains; then the oldest wave, and in it one probe of
    each group of unknown length (Seer), then the longest first. What is unknown may be the longest.
    """
    is_probe = not order.predicted and order.index == 0
    length = order.predicted or order.sampling.tokens_max
    return order.kind == "start", order.wave, not is_probe, -length
