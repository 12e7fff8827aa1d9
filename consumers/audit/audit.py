"""One pass over each topic of a run, then the store: what a run did, held to invariants 1 to 7.

It only reads: nothing is buried, nothing committed. Ends are fixed before the first record is read,
those of the ledger first, so that of a living run everything that the ledger names lies before
the ends of the topics that it names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from consumers.audit.fences import Fences
from consumers.audit.groups import Groups
from consumers.audit.lag import Lag, Policy
from consumers.audit.messages import Hole, Source
from consumers.audit.noted import Noted
from consumers.audit.objects import Objects
from consumers.audit.once import Once
from consumers.audit.rows import RowChecker, Rows
from consumers.audit.seen import Checker, Kept
from consumers.audit.spans import OneVersion, Spans
from consumers.audit.taken import Taken
from consumers.audit.tally import Tally
from consumers.audit.versions import Versions
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.topics import catalogue

ENDS = (
    "ledger", "annotations", "trajectories", "admissions", "applied", "weights", "assignments",
    "prompts",
)  # fmt: skip
READ = (
    "admissions", "ledger", "trajectories", "annotations", "weights", "applied", "assignments",
    "prompts",
)  # fmt: skip
ARCHIVED = ("admissions", "ledger", "trajectories", "annotations")
"""Topics whose checks want every record from the first on."""


@dataclass(slots=True)
class Audit:
    """`store` is None where a run has none (left); `tell` hears what is being read."""

    bus: Bus | None
    store: ObjectStore | None
    run: str
    policy: Policy
    tell: Callable[[str], None] = lambda text: None
    reading: Tally = field(default_factory=lambda: Tally(0, "what was read is whole"))
    _coverage: dict[str, Kept] = field(default_factory=dict[str, Kept])

    def check(self) -> list[Tally]:
        """One line for what was read, then one per invariant in their order."""
        topics = {topic.name: topic for topic in catalogue()}
        source = Source(self.bus, self.store, self.run, self.reading)
        for topic in ENDS:
            source.fix_end(topic)
        fences, taken = Fences(topics, self.reading), Taken()
        once, versions = Once(taken), Versions(taken)
        keep_version = self.policy.keep_version if self.policy.known else None
        of_rows = (once, Spans(), OneVersion(keep_version), Lag(taken, self.policy))
        folds: list[Checker] = [
            Groups(taken), *of_rows, Noted(taken, once.tally), versions, fences
        ]  # fmt: skip
        for topic in READ:
            self.tell(topic)
            self._coverage[topic] = self._read(source, topic, fences, taken, folds, of_rows)
        for fold in folds:
            fold.finish(self._coverage)
        if self.store is None:
            versions.tally.cannot("there is no store")
        else:
            Objects(self.store, versions, self.tell).check()
        return [self.reading, *_lines(folds)]

    @property
    def coverage(self) -> Mapping[str, Kept]:
        """How much of each topic was there."""
        return self._coverage

    def _read(
        self,
        source: Source,
        topic: str,
        fences: Fences,
        taken: Taken,
        folds: Sequence[Checker],
        row_folds: Sequence[RowChecker],
    ) -> Kept:
        count = gone = 0
        for one in source.messages(topic):
            if isinstance(one, Hole):
                fences.passed_over(topic, one)
                gone += one.end - one.start
                continue
            if isinstance(one, Rows):
                count += len(one)
                for fold in row_folds:
                    fold.apply_rows(one)
                continue
            count += 1
            seen = fences.judged(one)
            if seen is None:
                continue
            taken.apply(seen)
            for fold in folds:
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
            self.reading.notes.append(f"{text} (forgotten, as nothing needs them)")


def _lines(folds: list[Checker]) -> list[Tally]:
    """One tally per invariant: two folds may share one."""
    tallies = {fold.tally.number: fold.tally for fold in folds}
    return [tallies[number] for number in sorted(tallies)]
