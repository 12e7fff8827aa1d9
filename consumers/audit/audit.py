"""Audits a run: reads each topic once and then the store, and checks invariants 1 to 7, and 11 for
checkpoints.

The audit only reads: it dead-letters and commits nothing. The end offsets are fixed before the
first record is read, those of the ledger first, so that in a live run every record that the ledger
names is before the fixed ends of the other topics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from consumers.audit.checkpoints import Checkpoints
from consumers.audit.damage import Damage
from consumers.audit.decisions import Decisions
from consumers.audit.fences import Fences
from consumers.audit.groups import Groups
from consumers.audit.lag import Lag, Policy
from consumers.audit.messages import Hole, Source
from consumers.audit.noted import Noted
from consumers.audit.objects import Objects
from consumers.audit.once import Once
from consumers.audit.origins import Origins
from consumers.audit.reads import Reads
from consumers.audit.rows import RowChecker, Rows
from consumers.audit.seen import Checker, Kept, Seen
from consumers.audit.spans import Foreign, OneVersion, Spans
from consumers.audit.taken import Taken
from consumers.audit.tally import Tally
from consumers.audit.versions import Participants, Versions
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.records import Annotation, Trajectory
from streams.topics import catalogue, is_in_place

ENDS = (
    "ledger", "annotations", "trajectories", "admissions", "applied", "weights", "assignments",
    "partials", "prompts",
)  # fmt: skip
READ = (
    "admissions", "ledger", "annotations", "applied", "prompts", "assignments", "partials",
    "trajectories", "weights",
)  # fmt: skip
ARCHIVED = ("admissions", "ledger", "trajectories", "annotations")
"""Topics whose checks need every record from the first on."""


@dataclass(frozen=True, slots=True)
class Folds:
    """The folds over all records: `taken` and `reads` are applied before the others; `rows` also
    takes archived rows.
    """

    taken: Taken
    reads: Reads
    versions: Versions
    fences: Fences
    rows: Sequence[RowChecker]
    all: Sequence[Checker]


@dataclass(slots=True)
class Audit:
    """The audit of one run; `store` is None if the run has none, and `tell` is called with the name
    of each object that is read.
    """

    bus: Bus | None
    store: ObjectStore | None
    run: str
    policy: Policy
    tell: Callable[[str], None] = lambda text: None
    reading: Tally = field(
        default_factory=lambda: Tally(0, "the records that were read are complete")
    )
    _coverage: dict[str, Kept] = field(default_factory=dict[str, Kept])

    def check(self) -> list[Tally]:
        """One result for the completeness of the data, then one per invariant in their order."""
        source = Source(self.bus, self.store, self.run, self.reading)
        for topic in ENDS:
            source.fix_end(topic)
        folds = self._folds()
        for topic in READ:
            self.tell(topic)
            self._coverage[topic] = self._read(source, topic, folds)
        for fold in folds.all:
            fold.finish(self._coverage)
        if self.store is None:
            folds.versions.tally.cannot("there is no store")
        else:
            Objects(self.store, folds.versions, self.tell).check()
            checkpoints = Checkpoints(self.store, folds.versions, self.policy, self.tell)
            checkpoints.check()
            return [self.reading, *_lines(folds.all, folds.fences.unknown), checkpoints.tally]
        return [self.reading, *_lines(folds.all, folds.fences.unknown)]

    def _folds(self) -> Folds:
        topics = {topic.name: topic for topic in catalogue()}
        taken = Taken()
        groups, once, versions = (
            Groups(taken),
            Once(taken),
            Versions(taken, Participants(self.store)),
        )
        foreign = Foreign(groups.admitted, self._coverage, taken)
        spans = Spans(foreign)
        reads = Reads(groups.admitted)
        damage = Damage(self.bus, self.reading, reads.was_read)
        fences = Fences(topics, self.reading, damage)
        keep_version = self.policy.keep_version if self.policy.known else None
        rows = (
            once,
            spans,
            OneVersion(keep_version, foreign),
            Lag(taken, self.policy),
            Origins(taken, groups.admitted, spans.tally, self._coverage),
            Decisions(groups, taken, reads, self.policy, once.tally),
        )
        every = (groups, *rows, Noted(taken, once.tally), versions, fences)
        return Folds(taken, reads, versions, fences, rows, every)

    @property
    def coverage(self) -> Mapping[str, Kept]:
        """How much of each topic was available."""
        return self._coverage

    def _read(self, source: Source, topic: str, folds: Folds) -> Kept:
        count = gone = 0
        partitions = folds.reads.partitions.get(topic, 0)
        for one in source.messages(topic):
            if isinstance(one, Hole):
                folds.fences.passed_over(topic, one)
                gone += one.end - one.start
                continue
            if isinstance(one, Rows):
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
            folds.taken.apply(seen)
            folds.reads.apply(seen)
            for fold in folds.all:
                fold.apply(seen)
        if count:
            self.reading.counts[topic] = count
        if gone:
            self._say_gone(topic, gone)
            return "part"
        if source.has_log(topic):
            return "whole"
        return "archived" if count else "absent"

    def _say_gone(self, topic: str, gone: int) -> None:
        text = f"{topic}: {gone} records are neither in the log nor archived"
        if topic in ARCHIVED:
            self.reading.cannot(text)
        else:
            self.reading.notes.append(f"{text} (truncated, as no reader needs them)")


def _is_misplaced(seen: Seen, partitions: int) -> bool:
    """Whether the record is not in its key's partition; trainer and dispatch skip such records. The
    takes state how many partitions the trainer read.
    """
    record, partition = seen.record, seen.address.partition
    is_keyed = isinstance(record, Trajectory | Annotation)
    return is_keyed and not is_in_place(record.group, partition, partitions)


def _lines(folds: Sequence[Checker], unknown: str) -> list[Tally]:
    """One result per invariant; two folds may share one. An unknown record of a single-holder role
    may change the meaning of all others: then the log is not judged.
    """
    tallies = {fold.tally.number: fold.tally for fold in folds}
    for tally in tallies.values() if unknown else ():
        tally.withhold(unknown)
    return [tallies[number] for number in sorted(tallies)]
