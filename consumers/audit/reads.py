"""How far the trainer had read `trajectories` and `annotations` when it wrote each take.

A partition is read in order, so a take that names a completion at offset n had read its partition
beyond n; a take that carries its trainer's positions says it exactly. A new term reads again from
its checkpoint, so what an earlier term had read counts no more.

Grows with the run: two small tuples per take, shared where nothing changed, a number per group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from consumers.audit.groups import Admission
from consumers.audit.seen import Seen
from streams.records import Address, Opened, StepDone, Take

Bounds = tuple[int, ...]
"""By partition: everything below this offset was read."""


class TakeRead(msgspec.Struct, frozen=True, gc=False):
    """One take of the ledger: `trajectories` and `annotations` were read up to there, to the record
    where `exact`; `admission` is the highest offset in `admissions` of a group begun so far.
    """

    step: int
    at: Address
    term: int
    exact: bool
    trajectories: Bounds
    annotations: Bounds
    admission: int


@dataclass(slots=True)
class Reads:
    """The ledger's takes in their order, void ones left out."""

    admitted: Mapping[int, Admission]
    takes: list[TakeRead] = field(default_factory=list[TakeRead])
    begun: dict[int, int] = field(default_factory=dict[int, int])
    """Group → index of the take that began it."""
    seconds: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """(term, step) → how long the trainer of that term worked at the step."""
    furthest: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    """By topic and partition: what any term had read."""
    term: int = 0
    """The highest of the trainer that opened the ledger."""
    _last: TakeRead | None = None

    def apply(self, seen: Seen) -> None:
        if seen.void or seen.topic != "ledger":
            return
        match seen.record:
            case Opened() as opened:
                self.term, self._last = opened.term, None
            case Take() as take:
                self._take(take, seen.address)
            case StepDone() as done:
                self.seconds[self.term, done.step] = done.metrics.get("seconds", 0.0)
            case _:
                pass

    def of_group(self, group: int) -> TakeRead | None:
        """The take that began a group, None for one that none did."""
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

    def _take(self, take: Take, at: Address) -> None:
        before = self._last
        named = [member.at for group in take.groups for member in group.members]
        used = [note.at for note in take.annotations]
        read = positions_of(take)
        self._last = TakeRead(
            step=take.step,
            at=at,
            term=self.term,
            exact=read is not None,
            trajectories=self._bounds("trajectories", before and before.trajectories, named, read),
            annotations=self._bounds("annotations", before and before.annotations, used, read),
            admission=max(
                (a.offset for g in take.groups if (a := self.admitted.get(g.group)) is not None),
                default=-1,
            ),
        )
        if before is not None and before.admission > self._last.admission:
            self._last = msgspec.structs.replace(self._last, admission=before.admission)
        for group in take.groups:
            self.begun.setdefault(group.group, len(self.takes))
        self.takes.append(self._last)

    def _bounds(
        self,
        topic: str,
        before: Bounds | None,
        named: list[Address],
        read: Mapping[str, Mapping[int, int]] | None,
    ) -> Bounds:
        found = {at.partition: 0 for at in named}
        for at in named:
            found[at.partition] = max(found[at.partition], at.offset + 1)
        if read is not None:
            found = {**found, **read.get(topic, {})}
        known = self.furthest.setdefault(topic, {})
        for partition, offset in found.items():
            known[partition] = max(known.get(partition, 0), offset)
        before = before or ()
        if all(within(before, partition, offset - 1) for partition, offset in found.items()):
            return before
        length = max(len(before), max(found) + 1)
        bounds = [*before, *[0] * (length - len(before))]
        for partition, offset in found.items():
            bounds[partition] = max(bounds[partition], offset)
        return tuple(bounds)


def within(bounds: Bounds, partition: int, offset: int) -> bool:
    """Whether the record at this offset lies in what was read."""
    return partition < len(bounds) and offset < bounds[partition]


def positions_of(take: Take) -> Mapping[str, Mapping[int, int]] | None:
    """The positions that a take carries, by topic and partition; None in takes of older releases,
    which carry none.
    """
    del take
    return None
