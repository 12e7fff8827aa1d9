"""The other relays, from the `status` topic and from this process's own failures to reach them.

A relay that fails is suspected for a while and left out of the chain at once; heartbeats decide the
rest.
"""

import logging
import threading
import time
from collections.abc import Callable

from rollstream.storage.relay.chain import ChainMember, living_chain, unexpired_suspects, upstream_of
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import RelayStatus

log = logging.getLogger(__name__)

SUSPICION_S = 3.0
MEMBERS_MAX = 10_000


class RelayDirectory:
    """Safe to share between threads. `poll` reads the topic; all other methods use what it has
    read.
    """

    def __init__(
        self,
        bus: Bus,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self.reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.Lock()
        self._members: dict[str, ChainMember] = {}
        self._suspects: dict[int, float] = {}
        self._polled_s = float("-inf")

    def poll(self, every_s: float = 0.0) -> None:
        """Read `status` to its present end, unless that happened within `every_s`. A relay that was
        dead before the first call stays in the chain for the time-out, unless it is suspected.
        """
        with self._lock:
            now = self._clock()
            if now - self._polled_s < every_s:
                return
            for batch in self.reader.batches_to(self._bus.end("status")):
                for one in batch:
                    if isinstance(one.record, RelayStatus):
                        self._note_heartbeat(one.record, now)
            self._polled_s = now

    def members(self) -> list[ChainMember]:
        """The chain as this process sees it, head first. Time-outs count up to the last `poll`: a
        process that stood still since then has not read heartbeats.
        """
        with self._lock:
            self._suspects = unexpired_suspects(self._suspects, self._clock(), SUSPICION_S)
            return living_chain(self._members.values(), self._polled_s, self._timeout_s, self._suspects)

    def upstream(self, term: int) -> ChainMember | None:
        """The relay from which the relay of this term reads."""
        return upstream_of(term, self.members())

    def head(self) -> ChainMember | None:
        """The relay that receives the trainer's pushes."""
        return next(iter(self.members()), None)

    def term_of(self, name: str) -> int:
        """The highest known term of the relay of this name; 0 if none is known."""
        with self._lock:
            known = self._members.get(name)
            return 0 if known is None else known.term

    def suspect(self, member: ChainMember, reason: object) -> None:
        """Leave the relay out of the chain for a while, because it failed just now."""
        with self._lock:
            if member.term not in self._suspects:
                log.warning("relay %s/%d is left out: %s", member.name, member.term, reason)
            self._suspects[member.term] = self._clock()

    def _note_heartbeat(self, status: RelayStatus, now_s: float) -> None:
        known = self._members.get(status.relay)
        if known is not None and known.term > status.term:
            return
        if known is None and len(self._members) >= MEMBERS_MAX:
            oldest = min(self._members.values(), key=lambda member: member.heartbeat_s)
            del self._members[oldest.name]
        self._members[status.relay] = ChainMember(status.relay, status.term, status.url, now_s)
