"""Which relay reads from which, as pure functions (invariant 9). A relay's upstream is the nearest
living relay with a lower term; the first, the head, gets versions by pushes, else from the bucket.
The relays of each site are a chain.
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
    """One start of a relay. `url` is "" once it is leaving; `heartbeat_s` is the time at which its
    last heartbeat was read.
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
    """Returns the relays in the order of terms: of each name the newest start, if it has a
    heartbeat within the time-out, is not leaving and its term is not `suspected`.
    """
    newest: dict[str, ChainMember] = {}
    for member in members:
        previous = newest.get(member.name)
        if previous is None or member.term > previous.term:
            newest[member.name] = member
    living = (
        member
        for member in newest.values()
        if member.url and now_s - member.heartbeat_s <= timeout_s and member.term not in suspected
    )
    return sorted(living, key=lambda member: member.term)


def upstream_of(term: int, ordered: Iterable[ChainMember], site: str = "") -> ChainMember | None:
    """Returns the nearest before `term`, of this `site` if there is one; None for the first of all.

    Every relay reads from lower terms only, so no cycle of waiting can form, whatever each knows of
    the others.
    """
    before = [member for member in ordered if member.term < term]
    # A version crosses the link to a site once: two sites whose relays started in turns (A1 B2 A3
    # B4) would else send it there and back.
    near = [member for member in before if member.site == site]
    return max(near or before, key=lambda member: member.term, default=None)


def head_of(ordered: Sequence[ChainMember], site: str = "") -> ChainMember | None:
    """Returns the relay where a trainer at this `site` pushes: the first one there, else of all."""
    near = (member for member in ordered if member.site == site)
    return next(near, next(iter(ordered), None))


def unexpired_suspects(
    suspects: Mapping[int, float], now_s: float, forgive_s: float
) -> dict[int, float]:
    """Returns term → time of the last failure, for failures of the last `forgive_s`."""
    return {term: at for term, at in suspects.items() if now_s - at < forgive_s}


class RelayDirectory:
    """A relay without a heartbeat for `timeout_s` counts as dead. Threads may share a directory."""

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
        """Reads `status`, unless that happened within `every_s` seconds."""
        with self._lock:
            now = self._clock()
            if now - self._polled_s < every_s:
                return
            for batch in self.reader.batches_to(self._bus.end("status")):
                for received in batch:
                    if isinstance(received.record, RelayStatus):
                        self._note_heartbeat(received.record, now)
            # No heartbeat could be read: else each relay of a site whose network was cut would
            # become head of its own chain.
            if log_was_silent:
                members = self._members.items()
                self._members = {name: replace(member, heartbeat_s=now) for name, member in members}
            self._polled_s = now

    def members(self) -> list[ChainMember]:
        with self._lock:
            self._suspects = unexpired_suspects(self._suspects, self._clock(), SUSPICION_S)
            # The time-out as of the last `poll`: a process that stood still since then has read no
            # heartbeats, and would take all relays for dead.
            return living_chain(
                self._members.values(), self._polled_s, self._timeout_s, self._suspects
            )

    def upstream(self, term: int) -> ChainMember | None:
        return upstream_of(term, self.members(), self._site)

    def head(self) -> ChainMember | None:
        return head_of(self.members(), self._site)

    def term_of(self, name: str) -> int:
        with self._lock:
            member = self._members.get(name)
            return 0 if member is None else member.term

    def suspect(self, member: ChainMember, reason: object) -> None:
        """Leaves the relay, which this process failed to reach, out of the chain for `SUSPICION_S`;
        then heartbeats decide.
        """
        with self._lock:
            if member.term not in self._suspects:
                log.warning("relay %s/%d is left out: %s", member.name, member.term, reason)
            self._suspects[member.term] = self._clock()

    def _note_heartbeat(self, status: RelayStatus, now_s: float) -> None:
        previous = self._members.get(status.relay)
        if previous is not None and previous.term > status.term:
            return
        if previous is None and len(self._members) >= MEMBERS_MAX:
            oldest = min(self._members.values(), key=lambda member: member.heartbeat_s)
            del self._members[oldest.name]
        self._members[status.relay] = ChainMember(
            status.relay, status.term, status.url, now_s, status.site
        )


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """`base` is the version that it needs: a delta's parent, an adapter's base weights, None for an
    anchor.
    """

    version: Version
    bytes: int
    base: Version | None = None


def versions_to_keep(
    holdings: Sequence[CachedVersion], versions_max: int, bytes_max: int
) -> frozenset[Version]:
    """Returns those of the newest `versions_max` versions that fit in `bytes_max` bytes, newest
    first, then their bases.
    """
    by_version = {holding.version: holding for holding in holdings}
    retained: set[Version] = set()
    room = bytes_max
    newest = sorted(by_version, reverse=True)[:versions_max]
    for version in newest:
        if by_version[version].bytes <= room:
            retained.add(version)
            room -= by_version[version].bytes
    for version in [version for version in newest if version in retained]:
        for base in _bases(version, by_version):
            if base not in retained:
                if by_version[base].bytes > room:
                    break
                retained.add(base)
                room -= by_version[base].bytes
    return frozenset(retained)


def _bases(version: Version, by_version: Mapping[Version, CachedVersion]) -> list[Version]:
    bases: list[Version] = []
    base = by_version[version].base
    while base is not None and base in by_version and base not in bases:
        bases.append(base)
        base = by_version[base].base
    return bases
