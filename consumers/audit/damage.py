"""Classifies bytes that are no record, in topics with many writers: foreign bytes, or a record that
was lost.

Any program may append to these topics, so bytes that no reader could ever decode are no loss. They
are told apart by these rules, in order:
* the copy in `<topic>.dead` has the same bytes: they were no record when they were first read;
* the copy has other bytes: they changed since;
* the header decodes and its checksum is right: the bytes are unchanged since they were written,
  with a schema or fields that this release does not know; but a claim whose object is gone counts
  as a lost record;
* neither `RSR1` at the front nor a checksum that fits: the bytes never were a record of this
  format;
* all others were a record, or were made to look like one: if a trainer read beyond them without a
  copy in `.dead`, they were a record then. Otherwise it cannot be decided.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from rollstream.consumers.audit.seen import AuditMessage
from rollstream.consumers.audit.tally import InvariantResult
from rollstream.streams.bus import Bus
from rollstream.streams.codec import MAGIC, record_hash, decode, envelope_of
from rollstream.errors import BusError, DecodeError, PositionLost
from rollstream.streams.values import Address
from rollstream.streams.records import Claim, Dead

NOTES_MAX = 10
_CHECKSUM_AT, _BODY_AT = 8, 16
_PAGE = 512


@dataclass(slots=True)
class UnreadableRecords:
    """Classifies unreadable bytes; `was_read` returns whether a trainer certainly read the record
    at an address.
    """

    bus: Bus | None
    tally: InvariantResult
    was_read: Callable[[str, Address], bool]
    _ends: dict[str, int] = field(default_factory=dict[str, int])
    _copies: dict[str, dict[Address, str]] = field(default_factory=dict[str, dict[Address, str]])
    _is_whole: dict[str, bool] = field(default_factory=dict[str, bool])

    def judge(self, seen: AuditMessage, archived: bool) -> None:
        """Count the bytes, or record a violation."""
        copy = self._dead(seen.topic).get(seen.address)
        where = f"{seen.topic} {seen.address.partition}:{seen.address.offset}"
        if copy == record_hash(seen.data):
            self.tally.counts["dead-lettered"] += 1
        elif copy is not None:
            what = "the bytes differ from their dead-lettered copy"
            self.tally.offend(what, seen.topic, seen.address)
        elif archived or _is_foreign(seen.data):
            self._note(f"no record at {where}: {seen.reason}")
        elif self.was_read(seen.topic, seen.address) and self._is_whole[seen.topic]:
            what = f"a record that a trainer had read is unreadable now: {seen.reason}"
            self.tally.offend(what, seen.topic, seen.address)
        else:
            self.tally.counts["no records"] += 1
            self.tally.cannot(f"whether there was a record at {where}: {seen.reason}")

    def _note(self, text: str) -> None:
        self.tally.counts["no records"] += 1
        if len(self.tally.notes) < NOTES_MAX:
            self.tally.notes.append(text)

    def _dead(self, topic: str) -> dict[Address, str]:
        """Hashes of the copies in `<topic>.dead` by the address of the original; read on first
        use.
        """
        if topic not in self._copies:
            self._copies[topic] = {}
            self._is_whole[topic] = False
            if self.bus is not None:
                self._read(self.bus, topic)
        return self._copies[topic]

    def _read(self, bus: Bus, topic: str) -> None:
        dead = f"{topic}.dead"
        try:
            positions = bus.begin(dead)
            ends = bus.end(dead)
            self._is_whole[topic] = not any(positions.values())
            while any(at < ends[partition] for partition, at in positions.items()):
                messages = bus.read(dead, positions, records_max=_PAGE)
                if not messages:
                    return
                for message in messages:
                    positions[message.partition] = message.offset + 1
                    self._keep(topic, message.value)
        except (PositionLost, BusError):  # no such topic, or it is truncated while it is read
            self._is_whole[topic] = False

    def _keep(self, topic: str, value: bytes | None) -> None:
        try:
            record = None if value is None else decode(value).record
        except DecodeError:
            return
        if isinstance(record, Dead) and record.source == topic:
            at = Address(record.partition, record.offset)
            self._copies[topic].setdefault(at, record_hash(record.original.tobytes()))


def _is_foreign(data: bytes) -> bool:
    """Whether the bytes never were a record that this program could read."""
    try:
        envelope_of(data)
    except DecodeError:
        body = xxh3_64_intdigest(memoryview(data)[_BODY_AT:])
        fits = body == int.from_bytes(data[_CHECKSUM_AT:_BODY_AT], "little")
        return not data.startswith(MAGIC) and not fits
    try:
        return not isinstance(decode(data).record, Claim)
    except DecodeError:
        return True
