"""Invariant 7: in topics of single-holder roles terms only grow, and no sequence number of a term
is missing.

Each message is classified by the same function as in every reader, but a gap does not stop the
audit: it is a violation, and classification resumes after it. Records that the fence drops are void
and counted; the other folds receive them marked as void.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.consumers.audit.damage import UnreadableRecords
from rollstream.consumers.audit.source import MissingRange
from rollstream.consumers.audit.seen import Coverage, AuditMessage
from rollstream.consumers.audit.tally import InvariantResult
from rollstream.streams.bus import Message
from rollstream.errors import SequenceGap
from rollstream.streams.fence import advance_fence
from rollstream.streams.judging import ClassifiedMessage, classify_message
from rollstream.streams.values import Address
from rollstream.streams.records import Fence, Opened
from rollstream.streams.release import upgrade_advice
from rollstream.streams.topics import Topic

PartitionFences = dict[tuple[str, int], Fence]


@dataclass(slots=True)
class FenceAudit:
    """The fence of every partition so far; `topics` is the catalogue by name."""

    topics: Mapping[str, Topic]
    reading: InvariantResult
    """The result on the completeness of the data, which counts bytes that are no record."""
    damage: UnreadableRecords
    unknown: str = ""
    """The first record of a single-holder role that only a newer release understands."""
    _release: str = ""
    tally: InvariantResult = field(
        default_factory=lambda: InvariantResult(7, "one holder writes: terms grow, no number is missing")
    )
    _fences: PartitionFences = field(default_factory=PartitionFences)

    def passed_over(self, topic: str, hole: MissingRange) -> None:
        """Records are missing; the next one is classified by the fence after them."""
        self._fences[topic, hole.partition] = hole.fence

    def judged(self, message: Message, archived: bool) -> AuditMessage | None:
        """The classified message; None for a tombstone."""
        if message.value is None:
            self.reading.counts["tombstones"] += 1
            return None
        topic, at = message.topic, Address(message.partition, message.offset)
        found = self._judge(topic, at, message.value)
        seen = AuditMessage(
            topic, at, found.record, found.envelope, found.reason, found.void, message.value
        )
        if self.topics[topic].writer:
            self._count(seen, found.newer)
        elif found.record is None:
            self.damage.judge(seen, archived)
        return seen

    def apply(self, seen: AuditMessage) -> None:
        """No effect: `judged` has done the work already."""

    def finish(self, coverage: Coverage) -> None:
        for name, topic in self.topics.items():
            if topic.writer and coverage.get(name) == "absent":
                self.tally.cannot(f"{name} is missing")

    def _judge(self, topic: str, at: Address, value: bytes) -> ClassifiedMessage:
        settings = self.topics[topic]
        fenced, compacted = bool(settings.writer), settings.cleanup == "compact"
        fence = self._fences.get((topic, at.partition), Fence())
        try:
            after, found = classify_message(value, fence, topic=topic, fenced=fenced, compacted=compacted)
        except SequenceGap as gap:
            self.tally.offend(str(gap), topic, at)
            _, found = classify_message(value, Fence(), topic=topic, fenced=False, compacted=False)
            assert found.envelope is not None
            after, _ = advance_fence(Fence(), found.envelope, opens=True, compacted=True)
        self._fences[topic, at.partition] = after
        is_first = fenced and at.offset == 0 and not compacted
        if is_first and found.record is not None and not isinstance(found.record, Opened):
            self.tally.offend("the first record is no `Opened`", topic, at)
        return found

    def _count(self, seen: AuditMessage, newer: str) -> None:
        counts, writer = self.tally.counts, self.topics[seen.topic].writer
        counts["records"] += 1
        if seen.void:
            counts["void"] += 1
        envelope = seen.envelope
        if envelope is None:
            what = f"the record is not in the envelope of a {writer}"
            what = f"{what}: {seen.reason}" if seen.reason else what
            self.tally.offend(what, seen.topic, seen.address)
            return
        if newer:
            self._keep_unknown(seen, newer)
        elif seen.record is None:
            self.tally.offend(f"no record: {seen.reason}", seen.topic, seen.address)
        if envelope.role != writer:
            what = f"written by {envelope.role}; only {writer} may write this topic"
            self.tally.offend(what, seen.topic, seen.address)
        counts["is the highest term"] = max(counts["is the highest term"], envelope.term)
        if isinstance(seen.record, Opened):
            self._release = seen.record.release or self._release
            counts["openings"] += 1
            if (seen.record.term, 0) != (envelope.term, envelope.sequence):
                what = f"`Opened` of term {seen.record.term} is record {envelope.sequence} of "
                what += f"term {envelope.term}"
                self.tally.offend(what, seen.topic, seen.address)

    def _keep_unknown(self, seen: AuditMessage, newer: str) -> None:
        """Remember the first such record; the newest `Opened` names the release to upgrade to."""
        where = f"{seen.topic} {seen.address.partition}:{seen.address.offset}"
        self.unknown = self.unknown or f"{where}: {newer}; {upgrade_advice(self._release)}"
