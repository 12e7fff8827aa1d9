"""Bytes that are no record, in topics of many writers: foreign ones, or a record that was lost.

Anyone may append anything there, so bytes that no reader could ever read are no loss. What tells
them apart:
* the copy in `<topic>.dead` has the same bytes: they were no record when they were first read;
* the copy has other bytes: they changed since;
* a header that reads, under a checksum that is right: the bytes are as their writer wrote them, of
  a schema or with fields that are not known here; but a claim whose object is gone is no record;
* neither `RSR1` in front nor a checksum that fits what follows: nothing of ours lay there;
* what is left was a record, or was made to look like one: where a trainer had read on beyond it
  without a copy in `.dead`, it was a record then. Elsewhere nobody can say.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from consumers.audit.seen import Seen
from consumers.audit.tally import Tally
from streams.bus import Bus
from streams.codec import MAGIC, content_hash, decode, envelope_of
from streams.errors import BusError, DecodeError, PositionLost
from streams.records import Address, Claim, Dead

NOTES_MAX = 10
_CHECKSUM_AT, _BODY_AT = 8, 16
_PAGE = 512


@dataclass(slots=True)
class Damage:
    """`was_read` says of a topic's record whether a trainer certainly read it."""

    bus: Bus | None
    tally: Tally
    was_read: Callable[[str, Address], bool]
    _ends: dict[str, int] = field(default_factory=dict[str, int])
    _copies: dict[str, dict[Address, str]] = field(default_factory=dict[str, dict[Address, str]])
    _is_whole: dict[str, bool] = field(default_factory=dict[str, bool])

    def judge(self, seen: Seen, archived: bool) -> None:
        """Bytes that are no record: a violation, or counted."""
        copy = self._dead(seen.topic).get(seen.address)
        where = f"{seen.topic} {seen.address.partition}:{seen.address.offset}"
        if copy == content_hash(seen.data):
            self.tally.counts["dead-lettered"] += 1
        elif copy is not None:
            what = "these are not the bytes that were dead-lettered"
            self.tally.offend(what, seen.topic, seen.address)
        elif archived or _is_foreign(seen.data):
            self._note(f"no record lies at {where}: {seen.reason}")
        elif self.was_read(seen.topic, seen.address) and self._is_whole[seen.topic]:
            what = f"a record that had been read is none any more: {seen.reason}"
            self.tally.offend(what, seen.topic, seen.address)
        else:
            self.tally.counts["no records"] += 1
            self.tally.cannot(f"whether a record lay at {where}: {seen.reason}")

    def _note(self, text: str) -> None:
        self.tally.counts["no records"] += 1
        if len(self.tally.notes) < NOTES_MAX:
            self.tally.notes.append(text)

    def _dead(self, topic: str) -> dict[Address, str]:
        """Hashes of the copies in `<topic>.dead`, by where the bytes lay; read when first asked."""
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
        except (PositionLost, BusError):  # no such topic, or it forgets as it is read
            self._is_whole[topic] = False

    def _keep(self, topic: str, value: bytes | None) -> None:
        try:
            record = None if value is None else decode(value).record
        except DecodeError:
            return
        if isinstance(record, Dead) and record.source == topic:
            at = Address(record.partition, record.offset)
            self._copies[topic].setdefault(at, content_hash(record.original.tobytes()))


def _is_foreign(data: bytes) -> bool:
    """Whether they never were a record that this program reads."""
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
