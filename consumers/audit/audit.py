"""Audits a run: reads each topic once and then the store, and checks invariants 1 to 7, and 11 for
checkpoints.

The audit only reads: it dead-letters and commits nothing. The end offsets are fixed before the
first record is read, those of the ledger first, so that in a live run every record that the ledger
names is before the fixed ends of the other topics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.audit.decisions import DecisionAudit
from rollstream.consumers.audit.exactly_once import AnnotationAudit, ExactlyOnceAudit
from rollstream.consumers.audit.fences import FenceAudit, UnreadableRecords
from rollstream.consumers.audit.folds import (
    AuditMessage,
    Completeness,
    InvariantResult,
    LedgerIndex,
    RecordFold,
)
from rollstream.consumers.audit.groups import GroupAudit
from rollstream.consumers.audit.origins import OriginAudit
from rollstream.consumers.audit.source import AuditSource, RowFold, TrajectoryRows
from rollstream.consumers.audit.spans import (
    AuditPolicy,
    ForeignCompletions,
    LagAudit,
    OneVersionAudit,
    SpanAudit,
)
from rollstream.consumers.audit.store import CheckpointAudit, StoreAudit
from rollstream.consumers.audit.trainer_reads import TrainerReads
from rollstream.consumers.audit.versions import KnownRollouts, VersionAudit
from rollstream.storage.archive.segments import Hole
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.topics import catalogue, is_in_key_partition

END_ORDER = (
    "ledger", "annotations", "trajectories", "admissions", "applied", "weights", "assignments",
    "partials", "prompts",
)  # fmt: skip
READ_ORDER = (
    "admissions", "ledger", "annotations", "applied", "prompts", "assignments", "partials",
    "trajectories", "weights",
)  # fmt: skip
ARCHIVED_TOPICS = ("admissions", "ledger", "trajectories", "annotations")
"""Topics whose checks need every record from the first on."""


@dataclass(frozen=True, slots=True)
class AuditFolds:
    """The folds over all records: `taken` and `reads` are applied before the others; `rows` also
    takes archived rows.
    """

    ledger: LedgerIndex
    reads: TrainerReads
    versions: VersionAudit
    fences: FenceAudit
    rows: Sequence[RowFold]
    all: Sequence[RecordFold]


@dataclass(slots=True)
class Audit:
    """The audit of one run; `store` is None if the run has none, and `tell` is called with the name
    of each object that is read.
    """

    bus: Bus | None
    store: ObjectStore | None
    run: str
    policy: AuditPolicy
    tell: Callable[[str], None] = lambda text: None
    reading: InvariantResult = field(
        default_factory=lambda: InvariantResult(0, "the records that were read are complete")
    )
    _coverage: dict[str, Completeness] = field(default_factory=dict[str, Completeness])

    def check(self) -> list[InvariantResult]:
        """One result for the completeness of the data, then one per invariant in their order."""
        source = AuditSource(self.bus, self.store, self.run, self.reading)
        for topic in END_ORDER:
            source.fix_end(topic)
        folds = self._folds()
        for topic in READ_ORDER:
            self.tell(topic)
            self._coverage[topic] = self._read(source, topic, folds)
        for fold in folds.all:
            fold.finish(self._coverage)
        stored: list[InvariantResult] = []
        if self.store is None:
            folds.versions.tally.add_unchecked("there is no store")
        else:
            StoreAudit(self.store, folds.versions, self.tell).check()
            checkpoints = CheckpointAudit(self.store, folds.versions, self.policy, self.tell)
            checkpoints.check()
            stored.append(checkpoints.tally)
        return [self.reading, *_results_by_invariant(folds.all, folds.fences.unknown), *stored]

    def _folds(self) -> AuditFolds:
        topics = {topic.name: topic for topic in catalogue()}
        ledger = LedgerIndex()
        groups, once, versions = (
            GroupAudit(ledger),
            ExactlyOnceAudit(ledger),
            VersionAudit(ledger, KnownRollouts(self.store)),
        )
        foreign = ForeignCompletions(groups.admitted, self._coverage, ledger)
        spans = SpanAudit(foreign)
        reads = TrainerReads(groups.admitted)
        damage = UnreadableRecords(self.bus, self.reading, reads.was_read)
        fences = FenceAudit(topics, self.reading, damage)
        keep_version = self.policy.keep_version if self.policy.known else None
        rows = (
            once,
            spans,
            OneVersionAudit(keep_version, foreign),
            LagAudit(ledger, self.policy),
            OriginAudit(ledger, groups.admitted, spans.tally, self._coverage),
            DecisionAudit(groups, ledger, reads, self.policy, once.tally),
        )
        every = (groups, *rows, AnnotationAudit(ledger, once.tally), versions, fences)
        return AuditFolds(ledger, reads, versions, fences, rows, every)

    @property
    def coverage(self) -> Mapping[str, Completeness]:
        """How much of each topic was available."""
        return self._coverage

    def _read(self, source: AuditSource, topic: str, folds: AuditFolds) -> Completeness:
        count = gone = 0
        partitions = folds.reads.partitions.get(topic, 0)
        for one in source.messages(topic):
            if isinstance(one, Hole):
                folds.fences.passed_over(topic, one)
                gone += one.end - one.start
                continue
            if isinstance(one, TrajectoryRows):
                count += len(one)
                misplaced = len(one)
                for rows in one.in_place(partitions):
                    misplaced -= len(rows)
                    for fold in folds.rows:
                        fold.apply_rows(rows)
                if misplaced:
                    self.reading.counts["misplaced"] += misplaced
                continue
            count += 1
            seen = folds.fences.judged(one, source.is_archived)
            if seen is None:
                continue
            if partitions and _is_misplaced(seen, partitions):
                self.reading.counts["misplaced"] += 1
                continue
            folds.ledger.apply(seen)
            folds.reads.apply(seen)
            for fold in folds.all:
                fold.apply(seen)
        if count:
            self.reading.counts[topic] = count
        if gone:
            self._report_missing(topic, gone)
            return "part"
        if source.has_log(topic):
            return "whole"
        return "archived" if count else "absent"

    def _report_missing(self, topic: str, gone: int) -> None:
        text = f"{topic}: {gone} records are neither in the log nor archived"
        if topic in ARCHIVED_TOPICS:
            self.reading.add_unchecked(text)
        else:
            self.reading.notes.append(f"{text} (truncated, as no reader needs them)")


def _is_misplaced(seen: AuditMessage, partitions: int) -> bool:
    """Whether the record is not in its key's partition; trainer and dispatch skip such records. The
    takes state how many partitions the trainer read.
    """
    record, partition = seen.record, seen.address.partition
    is_keyed = isinstance(record, Trajectory | Annotation)
    return is_keyed and not is_in_key_partition(record.group, partition, partitions)


def _results_by_invariant(folds: Sequence[RecordFold], unknown: str) -> list[InvariantResult]:
    """One result per invariant; two folds may share one. An unknown record of a single-holder role
    may change the meaning of all others: then the log is not judged.
    """
    tallies = {fold.tally.number: fold.tally for fold in folds}
    for tally in tallies.values() if unknown else ():
        tally.withhold(unknown)
    return [tallies[number] for number in sorted(tallies)]
