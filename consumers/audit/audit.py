"""Audits a run: invariants 1 to 7, and 11 for checkpoints. An `Audit` reads each topic once and
passes every message to the folds; then it checks the store. `continued_audit` continues from the
previous verdict.

The end offsets are fixed before the first record is read, the ledger's first, so in a live run
every record that the ledger names is before the ends of the other topics.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollstream.consumers.audit.decisions import DecisionAudit
from rollstream.consumers.audit.exactly_once import AnnotationAudit, ExactlyOnceAudit
from rollstream.consumers.audit.fences import FenceAudit, UnreadableRecords
from rollstream.consumers.audit.folds import (
    AuditMessage,
    Completeness,
    InvariantResult,
    LedgerIndex,
    Offender,
    RecordFold,
    results_by_invariant,
)
from rollstream.consumers.audit.groups import GroupAudit
from rollstream.consumers.audit.lags import LagAudit
from rollstream.consumers.audit.origins import OriginAudit
from rollstream.consumers.audit.repetitions import RepetitionAudit
from rollstream.consumers.audit.settings_since import SettingsAudit
from rollstream.consumers.audit.source import AuditSource, RowFold, TrajectoryRows
from rollstream.consumers.audit.spans import (
    AuditPolicy,
    ForeignCompletions,
    OneVersionAudit,
    SpanAudit,
)
from rollstream.consumers.audit.store import (
    CheckpointAudit,
    StoreAudit,
    check_named_streams,
)
from rollstream.consumers.audit.surplus import SurplusAudit
from rollstream.consumers.audit.trainer_reads import TrainerReads
from rollstream.consumers.audit.verdict import (
    JudgedTopic,
    TopicCursor,
    Verdict,
    VerdictRefused,
    basis_of,
    encode_state,
    findings_of,
    read_verdict,
    restore_state,
    write_verdict,
)
from rollstream.consumers.audit.versions import KnownRollouts, VersionAudit
from rollstream.errors import CorruptObject
from rollstream.storage.archive.segments import Hole
from rollstream.storage.skipped_rows import read_skipped_rows
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus, Message
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.topics import catalogue, is_in_key_partition

END_ORDER = (
    "ledger", "annotations", "trajectories", "admissions", "applied", "weights", "assignments",
    "partials", "prompts",
)  # fmt: skip
"""The order in which ends are fixed: a topic after those that name its records."""
READ_ORDER = (
    "admissions", "ledger", "annotations", "applied", "prompts", "assignments", "partials",
    "trajectories", "weights",
)  # fmt: skip
"""Folds compare later topics with earlier ones."""
TOPICS_OF: Mapping[type[RecordFold], Sequence[str]] = {
    ExactlyOnceAudit: ("ledger", "trajectories"),
    AnnotationAudit: ("annotations",),
    SpanAudit: ("trajectories",),
    SurplusAudit: ("trajectories",),
    LagAudit: ("ledger", "trajectories"),
    OriginAudit: ("applied", "prompts", "assignments", "partials", "trajectories"),
    DecisionAudit: ("ledger", "annotations", "trajectories"),
    RepetitionAudit: ("ledger",),
    SettingsAudit: ("ledger", "prompts"),
    FenceAudit: (),  # its `judged` classifies messages before the folds receive them
}
"""The topics of a fold; a fold that is not listed receives all."""
OF_GROUPS = ("annotations", "partials", "trajectories")
"""Topics whose records the next audit judges again while their group is open."""
ARCHIVED_TOPICS = ("admissions", "ledger", "trajectories", "annotations")
"""Topics whose checks need every record from the first on."""


@dataclass(frozen=True, slots=True)
class AuditFolds:
    """The folds: `all`, those of each topic (`by_topic`), and those that take archived trajectories
    in batches (`rows`). The shared indexes `ledger` and `reads` receive a record of the ledger
    first.
    """

    ledger: LedgerIndex
    reads: TrainerReads
    groups: GroupAudit
    versions: VersionAudit
    fences: FenceAudit
    origins: OriginAudit
    rows: Sequence[RowFold]
    all: Sequence[RecordFold]
    by_topic: Mapping[str, Sequence[RecordFold]]

    def apply(self, message: AuditMessage) -> None:
        if message.topic == "ledger":
            self.ledger.apply(message)
            self.reads.apply(message)
        for fold in self.by_topic[message.topic]:
            fold.apply(message)

    def with_state(self) -> list[object]:
        """Returns all objects whose state a verdict stores, each once, in a fixed order."""
        owners: list[object] = [self.ledger, self.reads, self.groups.attempts, self.origins.chains]
        owners += self.all
        results = {id(fold.result): fold.result for fold in self.all}
        return [*owners, *results.values()]


@dataclass(slots=True)
class Audit:
    """Audits one run, by one call of `check`. `bus` or `store` is None if the run has none; `tell`
    is called with the name of each topic and object that is read.
    """

    bus: Bus | None
    store: ObjectStore | None
    run: str
    policy: AuditPolicy
    tell: Callable[[str], None] = lambda text: None
    reading: InvariantResult = field(
        default_factory=lambda: InvariantResult(0, "the records that were read are complete")
    )
    topics: dict[str, JudgedTopic] = field(default_factory=dict[str, JudgedTopic])
    """How far each topic was judged, for the next verdict."""
    since_s: float | None = None
    """The end of the audit from which this one continued; None if it started at the first record.
    """
    skipped_copies: bool = False
    """Whether archived copies of records that the log still has were not verified."""
    _coverage: dict[str, Completeness] = field(default_factory=dict[str, Completeness])
    _open: set[int] = field(default_factory=set[int])
    """Groups whose end is not final by the ledger."""
    _left: list[tuple[AuditMessage, bool]] = field(default_factory=list[tuple[AuditMessage, bool]])
    """Messages whose outcome is not final; with each, whether it was archived."""

    def check(
        self,
        before: Verdict | None = None,
        keep: Callable[[bytes | None], None] | None = None,
        is_whole: bool = False,
    ) -> list[InvariantResult]:
        """Returns one result for the completeness of the data, then one per invariant in their
        order. With `before` the audit continues from that verdict; raises `VerdictRefused` if it is
        of another log. `keep` is called with the state for the next verdict, None if it cannot be
        stored. `is_whole` also verifies archived rows that the log still has.
        """
        source = AuditSource(self.bus, self.store, self.run, self.reading)
        for topic in END_ORDER:
            source.fix_end(topic)
        folds = self._folds()
        state = [self.reading, *folds.with_state()]
        if before is not None:
            restore_state(state, before.state)
            self.topics = dict(before.topics)
        for topic in READ_ORDER:
            self.tell(topic)
            self._read(source, topic, folds)
            if topic == "ledger":
                self._open = {g for g in folds.groups.admitted if not folds.groups.is_final(g)}
        if keep is not None:
            keep(encode_state(state))
        for message, archived in self._left:
            if message.record is None:
                folds.fences.damage.judge(message, archived)
            else:
                folds.apply(message)
        for topic in READ_ORDER:
            if source.has_log(topic) and source.view.archived(topic):
                if not is_whole:
                    self.skipped_copies = True
                    continue
                self.tell(f"archive of {topic}")
                self.reading.counts["also archived"] += source.check_archived(topic)
        return self._finish(folds)

    def _finish(self, folds: AuditFolds) -> list[InvariantResult]:
        for topic in READ_ORDER:
            judged = self.topics[topic]
            if judged.count:
                self.reading.counts[topic] = judged.count
            if judged.gone:
                self._report_missing(topic, judged.gone)
        for fold in folds.all:
            fold.finish(self._coverage)
        stored: list[InvariantResult] = []
        if self.store is None:
            folds.versions.result.add_unchecked("there is no store")
        else:
            StoreAudit(self.store, folds.versions, self.tell).check()
            check_named_streams(self.store, self.bus, folds.versions.result, self.tell)
            self._note_skipped_rows(self.store)
            checkpoints = CheckpointAudit(
                self.store, self.bus, folds.versions, self.policy, self.tell
            )
            checkpoints.check()
            stored.append(checkpoints.result)
        return [self.reading, *results_by_invariant(folds.all, folds.fences.unknown), *stored]

    def _note_skipped_rows(self, store: ObjectStore) -> None:
        try:
            # Rows of the data set that the run did not ask violate no invariant.
            self.reading.notes += [str(record) for record in read_skipped_rows(store)]
        except CorruptObject as error:
            self.reading.notes.append(str(error))

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
        origins = OriginAudit(ledger, groups.admitted, spans.result, self._coverage)
        reads = TrainerReads(groups.admitted)
        damage = UnreadableRecords(self.bus, self.reading, reads.was_read)
        fences = FenceAudit(topics, self.reading, damage)
        keep_version = self.policy.keep_version if self.policy.known else None
        surplus = SurplusAudit(groups, ledger, reads, once.result)
        rows = (
            once, surplus, spans, OneVersionAudit(keep_version, foreign),
            LagAudit(ledger, self.policy), origins,
            DecisionAudit(groups, ledger, reads, self.policy, once.result, surplus),
        )  # fmt: skip
        notes = AnnotationAudit(ledger, once.result)
        repetitions = RepetitionAudit(ledger, self.policy, once.result)
        since = SettingsAudit(groups, self.store, groups.result)
        every = (groups, since, *rows, notes, repetitions, versions, fences)
        by_topic = {
            topic: [fold for fold in every if topic in TOPICS_OF.get(type(fold), READ_ORDER)]
            for topic in READ_ORDER
        }
        return AuditFolds(ledger, reads, groups, versions, fences, origins, rows, every, by_topic)

    @property
    def coverage(self) -> Mapping[str, Completeness]:
        return self._coverage

    def _read(self, source: AuditSource, topic: str, folds: AuditFolds) -> None:
        is_compacted = folds.fences.topics[topic].cleanup == "compact"
        cursor = TopicCursor(self.topics.get(topic, JudgedTopic()), is_compacted)
        partitions = folds.reads.partitions.get(topic, 0)
        if not partitions and source.has_log(topic):
            partitions = source.view.key_partitions(topic)
        for piece in source.messages(topic, cursor.start):
            if isinstance(piece, Hole):
                if cursor.is_new(piece):
                    folds.fences.passed_over(topic, piece)
            elif isinstance(piece, TrajectoryRows):
                due_rows, new = cursor.split(piece)
                for row in due_rows:
                    self._judge(piece.message(row), True, cursor, folds)
                if new is not None:
                    self.reading.counts["from the archive"] += len(new)
                    self._judge_rows(new, partitions, cursor, folds)
            elif cursor.is_due(piece):
                self._judge_message(piece, source.is_archived, partitions, cursor, folds)
        judged = cursor.judged(must_prove=topic == "ledger")
        self.topics[topic] = judged
        if judged.gone:
            self._coverage[topic] = "part"
        elif source.has_log(topic):
            self._coverage[topic] = "whole"
        else:
            self._coverage[topic] = "archived" if judged.count else "absent"

    def _judge_message(
        self, raw: Message, archived: bool, partitions: int, cursor: TopicCursor, folds: AuditFolds
    ) -> None:
        if cursor.is_first_time(raw):
            self.reading.counts["from the archive" if archived else "from the log"] += 1
        message = folds.fences.judged(raw)
        if message is None:
            return
        if partitions and _is_misplaced(message, partitions):
            self.reading.counts["misplaced"] += 1
        else:
            self._judge(message, archived, cursor, folds)

    def _judge_rows(
        self, rows: TrajectoryRows, partitions: int, cursor: TopicCursor, folds: AuditFolds
    ) -> None:
        misplaced = len(rows)
        for placed in rows.in_place(partitions):
            misplaced -= len(placed)
            for piece in self._final_rows(placed, cursor):
                for fold in folds.rows:
                    fold.apply_rows(piece)
        if misplaced:
            self.reading.counts["misplaced"] += misplaced

    def _final_rows(self, rows: TrajectoryRows, cursor: TopicCursor) -> Iterator[TrajectoryRows]:
        if self._open.isdisjoint(rows.groups):
            yield rows
            return
        for row, group in enumerate(rows.groups):
            if group in self._open:
                self._leave(rows.message(row), True, cursor)
        yield from rows.where([group not in self._open for group in rows.groups])

    def _judge(
        self, message: AuditMessage, archived: bool, cursor: TopicCursor, folds: AuditFolds
    ) -> None:
        damage = folds.fences.damage if folds.fences.is_damage(message) else None
        if damage is None:
            is_final = getattr(message.record, "group", None) not in self._open
            is_final = is_final or message.topic not in OF_GROUPS
        else:
            is_final = not damage.is_early(message)
        if not is_final:
            self._leave(message, archived, cursor)
        elif damage is not None:
            damage.judge(message, archived)
        else:
            folds.apply(message)

    def _leave(self, message: AuditMessage, archived: bool, cursor: TopicCursor) -> None:
        self._left.append((message, archived))
        cursor.leave(message.address)

    def _report_missing(self, topic: str, gone: int) -> None:
        text = f"{topic}: {gone} records are neither in the log nor archived"
        if topic in ARCHIVED_TOPICS:
            self.reading.add_unchecked(text)
        else:
            self.reading.notes.append(f"{text} (truncated, as no reader needs them)")


def continued_audit(
    make: Callable[[], Audit], is_whole: bool, place: str, clock: Callable[[], float] = time.time
) -> tuple[Audit, list[InvariantResult]]:
    """Audit a run from its last verdict on, and store the next one. Returns the audit and its
    results; `make` opens an audit of the run. With `is_whole`, or if the verdict cannot be used,
    the audit starts at the first record; `is_whole` also verifies every archived file. Only a
    verdict that this user's last audit of this `place` wrote on this machine is used.

    Violations that an earlier audit found stay violations; if the audit started at the first record
    and does not find them again, they become notes.
    """
    audit = make()
    # The data is a copy of an archive.
    if audit.bus is None:
        return audit, audit.check()
    basis, before = basis_of(audit.run, audit.policy), None
    try:
        before = read_verdict(audit.run, place)
    except CorruptObject as error:
        audit.reading.notes.append(str(error))
    used = before if before is not None and before.basis == basis and not is_whole else None
    states: list[bytes | None] = []
    try:
        results = audit.check(used, states.append, is_whole)
    except VerdictRefused:
        audit, used = make(), None
        states.clear()
        results = audit.check(None, states.append, is_whole)
    former = [] if before is None else before.former
    earlier_findings = [] if before is None else before.found
    missing = [finding for finding in earlier_findings if finding not in findings_of(results)]
    if used is None:
        former = [*former, *missing]
    else:
        _add_again(results, missing)
    reading = audit.reading
    refusal = "a record holds a number beyond 64 bits"
    if (state := states[0]) is not None:
        verdict = Verdict(basis, audit.topics, state, findings_of(results), former, clock())
        refusal = write_verdict(verdict, place)
    reading.notes += [
        f"an earlier audit found: {finding.where}: {finding.what}" for _, finding in former
    ]
    if used is not None:
        audit.since_s = used.time_s
        count = sum(topic.count for topic in used.topics.values())
        reading.notes.append(
            f"{count:,} messages were judged by an earlier audit, at {utc_minute(used.time_s)} on "
            "this machine (--whole repeats)"
        )
    if refusal:
        reading.notes.append(f"the next audit cannot continue from this one: {refusal}")
    return audit, results


def utc_minute(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _add_again(results: Sequence[InvariantResult], missing: Sequence[tuple[int, Offender]]) -> None:
    by_number = {result.number: result for result in results}
    for number, offender in missing:
        if number in by_number:
            by_number[number].add_violation(
                offender.what, offender.topic, offender.at, key=offender.key
            )


def _is_misplaced(message: AuditMessage, partitions: int) -> bool:
    # Trainer and dispatch skip records outside the partition of their key.
    record, partition = message.record, message.address.partition
    is_keyed = isinstance(record, Trajectory | Annotation)
    return is_keyed and not is_in_key_partition(record.group, partition, partitions)
