"""Decides from which relay each relay reads (`RelayDirectory`), and which versions a relay keeps
(`versions_to_keep`). The planning functions are pure (invariant 9).

Relays form a chain in the order of their terms: each reads from the nearest living one before it,
and the first one, the head, receives the trainer's push and reads the bucket. No cycle of waiting
can form, because every relay reads from lower terms only (`upstream_of`).
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import RelayStatus
from rollstream.streams.values import Version

RELAY_TERMS = "chain"
"""The single name under which the store counts the terms of all relays. No two starts have the same
term, and a later start has a higher one, so terms order the relays.
"""
log = logging.getLogger(__name__)
SUSPICION_S = 3.0
MEMBERS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class ChainMember:
    """Describes one start of a relay. `heartbeat_s` is the time of its last heartbeat on the
    reader's clock.
    """

    name: str
    term: int
    url: str
    heartbeat_s: float


def living_chain(
    members: Iterable[ChainMember],
    now_s: float,
    timeout_s: float,
    suspected: Collection[int] = (),
) -> list[ChainMember]:
    """Returns the living relays in order: those with a heartbeat within the time-out, not suspected
    (by term), not leaving (no URL), and only the newest start of each name. So the successor of a
    dead relay reads from the dead one's predecessor or becomes head, and a new relay is the last.
    """
    newest: dict[str, ChainMember] = {}
    for member in members:
        known = newest.get(member.name)
        if known is None or member.term > known.term:
            newest[member.name] = member
    living = (
        member
        for member in newest.values()
        if member.url and now_s - member.heartbeat_s <= timeout_s and member.term not in suspected
    )
    return sorted(living, key=lambda member: member.term)


def upstream_of(term: int, ordered: Iterable[ChainMember]) -> ChainMember | None:
    """Returns the nearest relay before `term`; None for the head.

    Every relay reads from lower terms only, so no cycle of waiting can form, whatever each relay
    believes about the others. Two relays with different views (A has noticed that C is dead, B has
    not) may read from the same relay, or both from the bucket: that costs bytes, never progress.
    """
    before = [member for member in ordered if member.term < term]
    return max(before, key=lambda member: member.term, default=None)


def unexpired_suspects(
    suspects: Mapping[int, float], now_s: float, forgive_s: float
) -> dict[int, float]:
    """Returns the suspects, by term with the time of their last failure, without those that failed
    `forgive_s` ago or earlier and are tried again.
    """
    return {term: at for term, at in suspects.items() if now_s - at < forgive_s}


class RelayDirectory:
    """Lists the relays by their heartbeats; threads may share it. `poll` reads the topic `status`;
    all other methods use the records read so far.
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
                for received in batch:
                    if isinstance(received.record, RelayStatus):
                        self._note_heartbeat(received.record, now)
            self._polled_s = now

    def members(self) -> list[ChainMember]:
        """Returns the chain as this process knows it, head first. Time-outs count up to the last
        `poll`: a process that stood still since then has not read heartbeats.
        """
        with self._lock:
            self._suspects = unexpired_suspects(self._suspects, self._clock(), SUSPICION_S)
            return living_chain(
                self._members.values(), self._polled_s, self._timeout_s, self._suspects
            )

    def upstream(self, term: int) -> ChainMember | None:
        """Returns the relay from which the relay of this term reads; None for the head."""
        return upstream_of(term, self.members())

    def head(self) -> ChainMember | None:
        """Returns the relay that receives the trainer's pushes; None without a living relay."""
        return next(iter(self.members()), None)

    def term_of(self, name: str) -> int:
        """Returns the highest known term of the relay of this name; 0 if none is known."""
        with self._lock:
            known = self._members.get(name)
            return 0 if known is None else known.term

    def suspect(self, member: ChainMember, reason: object) -> None:
        """Leave the relay out of the chain at once, for `SUSPICION_S`, because this process just
        failed to reach it. Heartbeats in `status` decide the rest.
        """
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


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """Names a version with objects that are here or arriving, and the bytes that it takes. A delta
    applies to `base`.
    """

    version: Version
    bytes: int
    base: Version | None = None


def versions_to_keep(
    holdings: Sequence[CachedVersion], versions_max: int, bytes_max: int
) -> frozenset[Version]:
    """Returns the versions to keep: the newest `versions_max` that fit, newest first; then the
    bases that kept deltas need, as far as they fit, each chain from its newest base down.

    A base that does not fit ends its chain: readers get the rest from the bucket.
    """
    known = {holding.version: holding for holding in holdings}
    kept: set[Version] = set()
    room = bytes_max
    newest = sorted(known, reverse=True)[:versions_max]
    for version in newest:
        if known[version].bytes <= room:
            kept.add(version)
            room -= known[version].bytes
    for version in [version for version in newest if version in kept]:
        for base in _bases(version, known):
            if base not in kept:
                if known[base].bytes > room:
                    break
                kept.add(base)
                room -= known[base].bytes
    return frozenset(kept)


def _bases(version: Version, known: Mapping[Version, CachedVersion]) -> list[Version]:
    found: list[Version] = []
    base = known[version].base
    while base is not None and base in known and base not in found:
        found.append(base)
        base = known[base].base
    return found
