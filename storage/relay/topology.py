"""Decides from which relay each relay reads (`RelayDirectory`), and which versions a relay keeps
(`versions_to_keep`). The planning functions are pure (invariant 9).

Relays form a chain in the order of their terms. Each reads versions from its upstream, the nearest
living relay before it; the first one, the head, gets them by the trainer's pushes, and otherwise
from the bucket (the object store). Where a run has several sites, the relays of each are a chain,
and only its first one reads over the link. Each relay plans for itself, from the heartbeats that it
read. Plans may differ, but no relays wait in a circle: each reads from a lower term
(`upstream_of`).
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import RelayStatus
from rollstream.streams.values import Version

log = logging.getLogger(__name__)
SUSPICION_S = 3.0  # a relay that could not be reached is left out for so long, then tried again
MEMBERS_MAX = 10_000  # names in a directory; beyond it the one with the oldest heartbeat is dropped


@dataclass(frozen=True, slots=True)
class ChainMember:
    """Describes one start of a relay. `url` is "" once it is leaving. `heartbeat_s` is the time at
    which this process read its last heartbeat. `site` is `relay.site`.
    """

    name: str
    term: int
    url: str
    heartbeat_s: float
    site: str = ""


def living_chain(
    members: Iterable[ChainMember],
    now_s: float,
    timeout_s: float,
    suspected: Collection[int] = (),
) -> list[ChainMember]:
    """Returns the living relays in the order of their terms: of each name the newest start, if it
    has a heartbeat within the time-out, is not leaving and its term is not `suspected`. So the
    relay after a dead one reads from the relay before it or becomes head, and a new relay is last.
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


def upstream_of(term: int, ordered: Iterable[ChainMember], site: str = "") -> ChainMember | None:
    """Returns the nearest relay of `ordered` before `term`, one of this `site` if there is one;
    None for the first of all relays. So a version crosses the link to a site once: two sites whose
    relays started in turns (A1 B2 A3 B4) would else send it there and back (A1 → B2 → A3 → B4).

    Every relay reads from lower terms only, so no cycle of waiting can form, whatever each relay
    knows of the others. Two relays that know different things (A has noticed that C is dead, B has
    not) may read from the same relay, or both from the bucket: that costs bytes, never progress.
    """
    before = [member for member in ordered if member.term < term]
    near = [member for member in before if member.site == site]
    return max(near or before, key=lambda member: member.term, default=None)


def head_of(ordered: Sequence[ChainMember], site: str = "") -> ChainMember | None:
    """Returns the relay to which a trainer at this `site` pushes: the first one there, or else the
    first of all; None without a relay.
    """
    near = (member for member in ordered if member.site == site)
    return next(near, next(iter(ordered), None))


def unexpired_suspects(
    suspects: Mapping[int, float], now_s: float, forgive_s: float
) -> dict[int, float]:
    """Returns the suspects without those whose last failure is at least `forgive_s` ago, which are
    tried again. `suspects` maps the term of a relay to the time of its last failure.
    """
    return {term: at for term, at in suspects.items() if now_s - at < forgive_s}


class RelayDirectory:
    """Knows the relays by their heartbeats, the `RelayStatus` records in the topic `status`. `poll`
    reads these; all other methods use what was read so far. A relay without a heartbeat for
    `timeout_s` counts as dead. `site` is that of this process. Threads may share a directory.
    """

    def __init__(
        self,
        bus: Bus,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        site: str = "",
    ) -> None:
        self._bus, self._site = bus, site
        self.reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.Lock()
        self._members: dict[str, ChainMember] = {}
        self._suspects: dict[int, float] = {}
        self._polled_s = float("-inf")

    def poll(self, every_s: float = 0.0, log_was_silent: bool = False) -> None:
        """Read `status` to its present end, unless that happened within the last `every_s` seconds.
        A heartbeat counts from the time at which it is read, so a relay that was dead before the
        first call stays in the chain for the time-out, unless it is suspected. After a silence of
        the log (`log_was_silent`), in which no heartbeat could be read, all known relays stay as
        long: else each relay of a site whose network was cut would become head of its own chain.
        """
        with self._lock:
            now = self._clock()
            if now - self._polled_s < every_s:
                return
            for batch in self.reader.batches_to(self._bus.end("status")):
                for received in batch:
                    if isinstance(received.record, RelayStatus):
                        self._note_heartbeat(received.record, now)
            if log_was_silent:
                members = self._members.items()
                self._members = {name: replace(one, heartbeat_s=now) for name, one in members}
            self._polled_s = now

    def members(self) -> list[ChainMember]:
        """Returns the chain as this process knows it, head first. The time-out is applied as of the
        last `poll`: without this a process that stood still since then, and has read no heartbeats,
        would take all relays for dead.
        """
        with self._lock:
            self._suspects = unexpired_suspects(self._suspects, self._clock(), SUSPICION_S)
            return living_chain(
                self._members.values(), self._polled_s, self._timeout_s, self._suspects
            )

    def upstream(self, term: int) -> ChainMember | None:
        """Returns the upstream of the relay of this term; None for the first of all relays."""
        return upstream_of(term, self.members(), self._site)

    def head(self) -> ChainMember | None:
        """Returns the relay that receives the trainer's pushes; None without a living relay."""
        return head_of(self.members(), self._site)

    def term_of(self, name: str) -> int:
        """Returns the highest known term of the relay of this name; 0 if none is known."""
        with self._lock:
            known = self._members.get(name)
            return 0 if known is None else known.term

    def suspect(self, member: ChainMember, reason: object) -> None:
        """Leave the relay out of this process's chain for `SUSPICION_S`, because this process just
        failed to reach it, which it notices long before the time-out. After that heartbeats decide.
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
        self._members[status.relay] = ChainMember(
            status.relay, status.term, status.url, now_s, status.site
        )


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """Names a version of which this relay holds or receives objects, and the bytes that it takes.
    `base` is the version that it cannot be used without: a delta's parent, an adapter's base
    weights, None for an anchor.
    """

    version: Version
    bytes: int
    base: Version | None = None


def versions_to_keep(
    holdings: Sequence[CachedVersion], versions_max: int, bytes_max: int
) -> frozenset[Version]:
    """Returns the versions to keep in `bytes_max` bytes. First, of the newest `versions_max`, those
    that fit, newest first. Then for each of these its base, the base of that, and so on; a base
    that does not fit ends its chain, and readers get the rest of it from the bucket.
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
    """Returns the version's base, the base of that, and so on, as far as they are known."""
    found: list[Version] = []
    base = known[version].base
    while base is not None and base in known and base not in found:
        found.append(base)
        base = known[base].base
    return found
