"""Checks invariant 7: only the holder writes a single-holder role's topics, terms only grow, and no
sequence number is missing. Also classifies bytes that are no record, in topics with many writers. A
gap is a violation, and classification resumes after it. Void records are counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from rollstream.consumers.audit.folds import AuditMessage, Coverage, InvariantResult
from rollstream.errors import BusError, DecodeError, SequenceGap
from rollstream.storage.archive.segments import Hole
from rollstream.streams.bus import Bus, Message
from rollstream.streams.classified import ClassifiedMessage, classify_message
from rollstream.streams.codec import MAGIC, decode, envelope_of, record_hash
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.fence import advance_fence
from rollstream.streams.records import Claim, Fence, Opened
from rollstream.streams.release import upgrade_advice
from rollstream.streams.topics import Topic
from rollstream.streams.values import Address

READ_BY_TRAINERS = ("trajectories", "annotations")
_CHECKSUM_AT, _BODY_AT = 8, 16


@dataclass(slots=True)
class UnreadableRecords:
    """Classifies bytes that are no record: foreign bytes, or a record that was lost. `was_read`
    returns whether a trainer certainly read the record at an address.

    Any program may append to topics with many writers. By these rules, in this order:
    * the dead-lettered copy has the same bytes: they were no record when first read;
    * the copy has other bytes: they changed since;
    * the bytes are from the archive, and verified: they were no record when they were archived;
    * the header decodes and its checksum is right: unchanged since they were written, with a schema
      or fields that this release does not have; but a claim whose object is gone counts as a lost
      record;
    * neither `RSR1` at the front nor a checksum that fits: never a record of this format;
    * all others were a record, or imitate one: if a trainer read beyond them, and the topic `dead`
      was read completely and has no copy of them, they were a record. Otherwise it cannot be
      decided.
    """

    bus: Bus | None
    result: InvariantResult
    was_read: Callable[[str, Address], bool]
    _copies: dict[str, dict[Address, str]] = field(default_factory=dict[str, dict[Address, str]])
    _is_whole: dict[str, bool] = field(default_factory=dict[str, bool])

    def is_early(self, message: AuditMessage) -> bool:
        """Whether trainers read this topic, but not these bytes yet: a later audit decides more."""
        return message.topic in READ_BY_TRAINERS and not self.was_read(
            message.topic, message.address
        )

    def judge(self, message: AuditMessage, archived: bool) -> None:
        copy = self._dead(message.topic).get(message.address)
        where = f"{message.topic} {message.address.partition}:{message.address.offset}"
        if copy == record_hash(message.data):
            self.result.counts["dead-lettered"] += 1
        elif copy is not None:
            what = "the bytes differ from their dead-lettered copy"
            self.result.add_violation(what, message.topic, message.address)
        elif archived or _is_foreign(message.data):
            self.result.add_note(f"no record at {where}: {message.reason}", "no records")
        elif self.was_read(message.topic, message.address) and self._is_whole[message.topic]:
            what = f"a record that a trainer had read is unreadable now: {message.reason}"
            self.result.add_violation(what, message.topic, message.address)
        else:
            self.result.counts["no records"] += 1
            self.result.add_unchecked(f"whether there was a record at {where}: {message.reason}")

    def _dead(self, topic: str) -> dict[Address, str]:
        if topic not in self._copies:
            self._copies[topic] = {}
            self._is_whole[topic] = False
            if self.bus is not None:
                self._read(self.bus, topic)
        return self._copies[topic]

    def _read(self, bus: Bus, topic: str) -> None:
        try:
            reader = DeadLetterReader(bus, (topic,))
            for dead in reader.read():
                if dead.source == topic:
                    at = Address(dead.partition, dead.offset)
                    self._copies[topic].setdefault(at, record_hash(dead.original.tobytes()))
            self._is_whole[topic] = reader.is_whole
        except BusError:
            self._is_whole[topic] = False


def _is_foreign(data: bytes) -> bool:
    try:
        envelope_of(data)
    except DecodeError:
        body = xxh3_64_intdigest(memoryview(data)[_BODY_AT:])
        fits = body == int.from_bytes(data[_CHECKSUM_AT:_BODY_AT], "little")
        return not data.startswith(MAGIC) and not fits
    try:
        # A claim whose object is missing was a record.
        return not isinstance(decode(data).record, Claim)
    except DecodeError:
        return True


PartitionFences = dict[tuple[str, int], Fence]


@dataclass(slots=True)
class FenceAudit:
    """Checks invariant 7 by the fence that the earlier messages of a partition left. `topics` is
    the catalogue by name.
    """

    topics: Mapping[str, Topic]
    reading: InvariantResult
    """The result on the completeness of the data."""
    damage: UnreadableRecords
    unknown: str = ""
    """The first record of a single-holder role that only a newer release understands."""
    _release: str = ""
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(
            7, "one holder writes: terms grow, no number is missing"
        )
    )
    _fences: PartitionFences = field(default_factory=PartitionFences)

    def passed_over(self, topic: str, hole: Hole) -> None:
        """Note missing records: the next one is classified by the fence after the hole."""
        self._fences[topic, hole.partition] = hole.fence

    def judged(self, message: Message) -> AuditMessage | None:
        """Returns the classified message; None for a tombstone."""
        if message.value is None:
            self.reading.counts["tombstones"] += 1
            return None
        topic, at = message.topic, Address(message.partition, message.offset)
        classified = self._judge(topic, at, message.value)
        judged = AuditMessage(
            topic,
            at,
            classified.record,
            classified.envelope,
            classified.reason,
            classified.void,
            message.value,
        )
        if self.topics[topic].writer:
            self._count(judged, classified.newer)
        return judged

    def is_damage(self, message: AuditMessage) -> bool:
        return message.record is None and not self.topics[message.topic].writer

    def apply(self, message: AuditMessage) -> None:
        """No effect: `judged` has done the work already."""

    def finish(self, coverage: Coverage) -> None:
        for name, topic in self.topics.items():
            if topic.writer and coverage.get(name) == "absent":
                self.result.add_unchecked(f"{name} is missing")

    def _judge(self, topic: str, at: Address, value: bytes) -> ClassifiedMessage:
        settings = self.topics[topic]
        fenced, compacted = bool(settings.writer), settings.cleanup == "compact"
        fence = self._fences.get((topic, at.partition), Fence())
        try:
            after, classified = classify_message(
                value, fence, topic=topic, fenced=fenced, compacted=compacted
            )
        except SequenceGap as gap:
            self.result.add_violation(str(gap), topic, at)
            _, classified = classify_message(
                value, Fence(), topic=topic, fenced=False, compacted=False
            )
            assert classified.envelope is not None
            # The fence from which classification resumes: as if this record were the first.
            after, _ = advance_fence(Fence(), classified.envelope, opens=True, compacted=True)
        self._fences[topic, at.partition] = after
        is_first = fenced and at.offset == 0 and not compacted
        if is_first and classified.record is not None and not isinstance(classified.record, Opened):
            self.result.add_violation("the first record is no `Opened`", topic, at)
        return classified

    def _count(self, message: AuditMessage, newer: str) -> None:
        counts, writer = self.result.counts, self.topics[message.topic].writer
        counts["records"] += 1
        if message.void:
            counts["void"] += 1
        envelope = message.envelope
        if envelope is None:
            what = f"the record is not in the envelope of a {writer}"
            what = f"{what}: {message.reason}" if message.reason else what
            self.result.add_violation(what, message.topic, message.address)
            return
        if newer:
            self._keep_unknown(message, newer)
        elif message.record is None:
            self.result.add_violation(
                f"no record: {message.reason}", message.topic, message.address
            )
        if envelope.role != writer:
            what = f"written by {envelope.role}; only {writer} may write this topic"
            self.result.add_violation(what, message.topic, message.address)
        counts["is the highest term"] = max(counts["is the highest term"], envelope.term)
        if isinstance(message.record, Opened):
            self._release = message.record.release or self._release
            counts["openings"] += 1
            if (message.record.term, 0) != (envelope.term, envelope.sequence):
                what = f"`Opened` of term {message.record.term} is record {envelope.sequence} of "
                what += f"term {envelope.term}"
                self.result.add_violation(what, message.topic, message.address)

    def _keep_unknown(self, message: AuditMessage, newer: str) -> None:
        where = f"{message.topic} {message.address.partition}:{message.address.offset}"
        # The newest `Opened` names the release to upgrade to.
        self.unknown = self.unknown or f"{where}: {newer}; {upgrade_advice(self._release)}"
