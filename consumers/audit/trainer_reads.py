"""Checks invariant 1 for open groups: none is skipped silently. `TrainerReads` derives from the
ledger how far the trainer had read at each take; `OpenGroupCheck` applies its rule to each open
group. Memory: two small tuples per take, shared if unchanged, and a number per group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rollstream.consumers.audit.folds import AuditMessage, LedgerIndex
from rollstream.consumers.audit.groups import Admission, GroupAudit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.prepare import PreparedGroup, prepare_group
from rollstream.consumers.trainer.data.sample import REWARD, is_annotated
from rollstream.streams.admissible import is_group_full
from rollstream.streams.records import Annotation, Opened, StepDone, Take, Trajectory
from rollstream.streams.values import Address, Version

ReadBounds = tuple[int, ...]
"""One offset per partition: all records below it were read."""


class TakeRead(msgspec.Struct, frozen=True, gc=False):
    """How far the trainer had read at one take, at address `at`. `trajectories` and `annotations`
    are its positions if `exact`, otherwise offsets that it had reached at least. `believed` is the
    highest believed version, if stated; `admission` the highest offset in `admissions` of the
    groups that this term has begun.
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
    """Collects the ledger's takes that begin groups (name them first), in their order, with the
    bounds up to which the trainer had read. Void takes are left out.
    """

    admitted: Mapping[int, Admission]
    takes: list[TakeRead] = field(default_factory=list[TakeRead])
    begun: dict[int, int] = field(default_factory=dict[int, int])
    """Group → index in `takes` of the take that began it."""
    seconds: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """(term, step) → seconds of that term's trainer."""
    furthest: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    """Topic → partition → the offset up to which a trainer of any term had read."""
    partitions: dict[str, int] = field(default_factory=dict[str, int])
    """Number of partitions of each topic that the trainer reads; empty if no take states it."""
    term: int = 0
    """The highest term of a trainer that opened the ledger."""
    believed: Version | None = None
    """The highest version that the ledger so far states to be believed."""
    _last: TakeRead | None = None
    """The newest of `takes` that is of the present term."""

    def apply(self, message: AuditMessage) -> None:
        if message.void or message.topic != "ledger":
            return
        match message.record:
            case Opened() as opened:
                self.term, self._last = opened.term, None
            case Take() as take:
                self._take(take, message.address)
            case StepDone() as done:
                self._believe(done.version)
                self.seconds[self.term, done.step] = done.metrics.get("seconds", 0.0)
            case _:
                pass

    def of_group(self, group: int) -> TakeRead | None:
        index = self.begun.get(group)
        return None if index is None else self.takes[index]

    def last_term(self) -> list[TakeRead]:
        """Returns the takes of the newest term that wrote any, in their order."""
        if not self.takes:
            return []
        term = self.takes[-1].term
        start = len(self.takes)
        while start and self.takes[start - 1].term == term:
            start -= 1
        return self.takes[start:]

    def was_read(self, topic: str, at: Address) -> bool:
        return at.offset < self.furthest.get(topic, {}).get(at.partition, 0)

    def _believe(self, version: Version) -> None:
        self.believed = version if self.believed is None else max(self.believed, version)

    def _take(self, take: Take, at: Address) -> None:
        if not take.groups:
            return
        if take.believed is not None:
            self._believe(take.believed)
        self.partitions |= {read.topic: len(read.offsets) for read in take.read}
        before = self._last
        taken = [member.at for group in take.groups for member in group.members]
        used = [note.at for note in take.annotations]
        admissions = [a.offset for g in take.groups if (a := self.admitted.get(g.group))]
        self._last = TakeRead(
            step=take.step,
            at=at,
            term=self.term,
            exact=bool(take.read),
            believed=take.believed,
            trajectories=self._bounds("trajectories", before and before.trajectories, taken, take),
            annotations=self._bounds("annotations", before and before.annotations, used, take),
            admission=max([*admissions, -1 if before is None else before.admission]),
        )
        for group in take.groups:
            self.begun.setdefault(group.group, len(self.takes))
        self.takes.append(self._last)

    def _bounds(
        self, topic: str, before: ReadBounds | None, addresses: list[Address], take: Take
    ) -> ReadBounds:
        ends = {
            p: at for read in take.read if read.topic == topic for p, at in enumerate(read.offsets)
        }
        # A partition is read in order, so a trainer that names a record at offset n has read beyond
        # n.
        for at in addresses:
            if at.offset >= ends.get(at.partition, 0):
                ends[at.partition] = at.offset + 1
        furthest = self.furthest.setdefault(topic, {})
        for partition, offset in ends.items():
            furthest[partition] = max(furthest.get(partition, 0), offset)
        # A new term reads again from its checkpoint, so its bounds begin empty.
        before = before or ()
        if all(is_within(before, partition, offset - 1) for partition, offset in ends.items()):
            return before
        bounds = [*before, *[0] * (max(ends) + 1 - len(before))]
        for partition, offset in ends.items():
            bounds[partition] = max(bounds[partition], offset)
        return tuple(bounds)


def is_within(bounds: ReadBounds, partition: int, offset: int) -> bool:
    """Whether the record at this offset is below the bounds."""
    return partition < len(bounds) and offset < bounds[partition]


RECENT_STEPS = 3  # a group that is skipped for ever is skipped in the last steps too


@dataclass(slots=True)
class GroupRecords:
    """The first completion that counts of each of a group's trajectories, and the first annotation
    of each (trajectory, name), with their addresses.
    """

    names: tuple[str, ...]
    """The group's trajectories."""
    arrived: dict[str, tuple[Trajectory, Address]] = field(
        default_factory=dict[str, tuple[Trajectory, Address]]
    )
    noted: dict[tuple[str, str], tuple[Annotation, Address]] = field(
        default_factory=dict[tuple[str, str], tuple[Annotation, Address]]
    )
    needed: int = 0
    """`Admitted.needed`: later completions are surplus, and are not held."""

    def is_full(self) -> bool:
        living = sum(record.finish != "dead" for record, _ in self.arrived.values())
        return is_group_full(len(self.names), self.needed, living, len(self.arrived))

    def before(self, trajectories: ReadBounds, annotations: ReadBounds) -> "GroupRecords":
        """Returns the records that are below these bounds."""
        arrived = {n: pair for n, pair in self.arrived.items() if _was_read(trajectories, pair[1])}
        notes = {k: pair for k, pair in self.noted.items() if _was_read(annotations, pair[1])}
        return GroupRecords(self.names, arrived, notes, self.needed)

    def records(self) -> list[Trajectory]:
        return [record for record, _ in self.arrived.values()]

    def notes(self) -> dict[tuple[str, str], Annotation]:
        return {key: note for key, (note, _) in self.noted.items() if key[0] in self.arrived}

    def annotation_variants(self) -> Iterator[dict[tuple[str, str], Annotation]]:
        """Yields the sets of annotations that the trainer may have known."""
        every = {key: note for key, (note, _) in self.noted.items()}
        yield every
        # The trainer does not wait for reward annotations of trajectories with a reward of their
        # own, and the log does not show whether it had read them.
        rewarded = {name for name, (record, _) in self.arrived.items() if record.reward is not None}
        needed = {key: n for key, n in every.items() if key[1] != REWARD or key[0] not in rewarded}
        if len(needed) < len(every):
            yield needed

    def is_complete(self, names: tuple[str, ...]) -> bool:
        """Whether all completions that count were read, and for each living one the annotations
        under these names, which the rule needs.
        """
        return self.is_full() and all(
            is_annotated(record, names, self.noted) for record in self.records()
        )


@dataclass(slots=True)
class OpenGroupCheck:
    """Checks that the trainer was right to leave each open group open.

    Before each take the trainer considers every group of which it has read all completions and
    annotations, or whose deadline has passed, and closes those that its rule closes, for instance
    above `max_lag`. With `choose = "oldest"` a group is taken before groups of newer versions. So
    an open group is a violation if it had to be closed by the last take, or if a recent take
    preferred a newer group.
    """

    groups: GroupAudit
    reads: TrainerReads
    policy: AuditPolicy
    oldest: Mapping[int, int]
    """Each group that a recent take began → the smallest version in it."""
    ledger: LedgerIndex

    def check(self, open_groups: Mapping[int, GroupRecords]) -> None:
        takes = self.reads.last_term()
        if not takes or self.policy.rule is None:
            return
        for group, records in open_groups.items():
            admission = self.groups.admitted.get(group)
            wrong = "" if admission is None else self._wrong(group, admission, records, takes)
            if wrong and admission is not None:
                at = Address(0, admission.offset)
                self.groups.result.add_violation(
                    f"group {group} is open: {wrong}", "admissions", at
                )

    def _wrong(
        self, group: int, admission: Admission, records: GroupRecords, takes: list[TakeRead]
    ) -> str:
        last = takes[-1]
        decision = self._looked_at(admission, records, takes, last)
        if decision is None:
            return ""
        if decision.ending:
            return f"step {last.step} was trained after the rule made the group {decision.ending}"
        # Other rules of choice may let a group wait.
        if self.policy.choose != "oldest":
            return ""
        key = _choice_key(group, decision)
        for taken in recent_takes(takes):
            for later in (g for g, i in self.reads.begun.items() if self.reads.takes[i] is taken):
                version = self.oldest.get(later)
                if version is None or (version, later) <= key:
                    continue
                if self._looked_at(admission, records, takes, taken) is not None:
                    return f"step {taken.step} took group {later} of version {version} first"
        return ""

    def _looked_at(
        self, admission: Admission, records: GroupRecords, takes: list[TakeRead], take: TakeRead
    ) -> PreparedGroup | None:
        """Returns the rule's decision on the group at this take; None if the trainer did not have
        to decide.
        """
        rule = self.policy.rule
        assert rule is not None
        seen = records.before(take.trajectories, take.annotations)
        if not seen.is_complete(rule.names):
            # Bounds that are not exact hide which of the records that arrived had been read.
            is_known = take.exact or not records.arrived
            if not is_known or not self._is_overdue(admission, takes, take):
                return None
        # Any number: only the decision is used.
        group = admission.prompt.offset
        believed = self.ledger.believed.up_to(take.believed)
        return prepare_group(group, seen.records(), seen.notes(), rule, take.step - 1, believed)

    def _is_overdue(self, admission: Admission, takes: list[TakeRead], take: TakeRead) -> bool:
        # When the trainer first took a group that was admitted later, it had read this group's
        # admission, so the deadline ran from then on. Durations of steps are added up: no clocks
        # are compared.
        since = next(
            (candidate for candidate in takes if candidate.admission >= admission.offset), None
        )
        if since is None:
            return False
        steps = range(since.step + 1, take.step)
        passed_s = sum(self.reads.seconds.get((take.term, step), 0.0) for step in steps)
        return passed_s >= admission.deadline_s


def recent_takes(takes: list[TakeRead]) -> Iterator[TakeRead]:
    """Yields the takes of the last `RECENT_STEPS` steps, the newest first."""
    for take in reversed(takes):
        if take.step <= takes[-1].step - RECENT_STEPS:
            return
        yield take


def _was_read(bounds: ReadBounds, at: Address) -> bool:
    return is_within(bounds, at.partition, at.offset)


def _choice_key(group: int, prepared: PreparedGroup) -> tuple[int, int]:
    versions = [span.version.number for sample in prepared.samples for span in sample.spans]
    return min(versions), group
