"""How far the trainer had read `trajectories` and `annotations` when it wrote each take.

A partition is read in order, so a take that names a completion at offset n had read its partition
beyond n; a take with its trainer's positions states the exact offset. A new term reads again from
its checkpoint, so the positions of an earlier term do not count.

Grows with the run: two small tuples per take, shared if unchanged, and a number per group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rollstream.consumers.audit.folds import AuditMessage
from rollstream.consumers.audit.groups import Admission
from rollstream.streams.records import Opened, StepDone, Take
from rollstream.streams.values import Address, Version

ReadBounds = tuple[int, ...]
"""By partition: all records below this offset were read."""


class TakeRead(msgspec.Struct, frozen=True, gc=False):
    """One take of the ledger. `trajectories` and `annotations` are the offsets up to which they
    were read, precise if `exact`; `believed` is the highest version then; `admission` is the
    highest offset in `admissions` of a group begun so far.
    """

    step: int
    at: Address
    term: int
    exact: bool
    believed: Version | None
    trajectories: ReadBounds
    annotations: ReadBounds
    admission: int


@dataclass(slots=True)
class TrainerReads:
    """The ledger's non-void takes in their order."""

    admitted: Mapping[int, Admission]
    takes: list[TakeRead] = field(default_factory=list[TakeRead])
    begun: dict[int, int] = field(default_factory=dict[int, int])
    """Group → index of the take that began it."""
    seconds: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """(term, step) → seconds that the trainer of that term spent on the step."""
    furthest: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    """By topic and partition: the offset that any term had read up to."""
    partitions: dict[str, int] = field(default_factory=dict[str, int])
    """Number of partitions of each topic that the trainer reads; empty if no take states it."""
    term: int = 0
    """The highest term of a trainer that opened the ledger."""
    believed: Version | None = None
    """The highest believed version by the ledger so far."""
    _last: TakeRead | None = None

    def apply(self, seen: AuditMessage) -> None:
        if seen.void or seen.topic != "ledger":
            return
        match seen.record:
            case Opened() as opened:
                self.term, self._last = opened.term, None
            case Take() as take:
                self._take(take, seen.address)
            case StepDone() as done:
                self._believe(done.version)
                self.seconds[self.term, done.step] = done.metrics.get("seconds", 0.0)
            case _:
                pass

    def of_group(self, group: int) -> TakeRead | None:
        """The take that began the group; None if no take did."""
        index = self.begun.get(group)
        return None if index is None else self.takes[index]

    def last_term(self) -> list[TakeRead]:
        """The takes of the newest term that wrote any, in their order."""
        if not self.takes:
            return []
        term = self.takes[-1].term
        start = len(self.takes)
        while start and self.takes[start - 1].term == term:
            start -= 1
        return self.takes[start:]

    def was_read(self, topic: str, at: Address) -> bool:
        """Whether a trainer certainly read this record."""
        return at.offset < self.furthest.get(topic, {}).get(at.partition, 0)

    def _believe(self, version: Version) -> None:
        self.believed = version if self.believed is None else max(self.believed, version)

    def _take(self, take: Take, at: Address) -> None:
        """Record a take that begins groups; others add no information."""
        if not take.groups:
            return
        if take.believed is not None:
            self._believe(take.believed)
        self.partitions |= {read.topic: len(read.offsets) for read in take.read}
        before = self._last
        named = [member.at for group in take.groups for member in group.members]
        used = [note.at for note in take.annotations]
        admissions = [a.offset for g in take.groups if (a := self.admitted.get(g.group))]
        self._last = TakeRead(
            step=take.step,
            at=at,
            term=self.term,
            exact=bool(take.read),
            believed=take.believed,
            trajectories=self._bounds("trajectories", before and before.trajectories, named, take),
            annotations=self._bounds("annotations", before and before.annotations, used, take),
            admission=max([*admissions, -1 if before is None else before.admission]),
        )
        for group in take.groups:
            self.begun.setdefault(group.group, len(self.takes))
        self.takes.append(self._last)

    def _bounds(
        self, topic: str, before: ReadBounds | None, named: list[Address], take: Take
    ) -> ReadBounds:
        """The term's bounds so far, advanced to the positions that this take states or implies."""
        found = {
            p: at for read in take.read if read.topic == topic for p, at in enumerate(read.offsets)
        }
        for at in named:
            if at.offset >= found.get(at.partition, 0):
                found[at.partition] = at.offset + 1
        known = self.furthest.setdefault(topic, {})
        for partition, offset in found.items():
            known[partition] = max(known.get(partition, 0), offset)
        before = before or ()
        if all(is_within(before, partition, offset - 1) for partition, offset in found.items()):
            return before
        bounds = [*before, *[0] * (max(found) + 1 - len(before))]
        for partition, offset in found.items():
            bounds[partition] = max(bounds[partition], offset)
        return tuple(bounds)


def is_within(bounds: ReadBounds, partition: int, offset: int) -> bool:
    """Whether the record at this offset had been read."""
    return partition < len(bounds) and offset < bounds[partition]
