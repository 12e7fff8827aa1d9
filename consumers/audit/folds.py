"""What the audit's checks share: a check is a fold (`RecordFold`) over a run's messages in order;
`InvariantResult` has its violations, with the places of the first few; `LedgerIndex` indexes the
ledger, about 0.3 KiB per trajectory of a trained group, a few bytes per step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from rollstream.streams.admissible import BelievedVersions, believed_terms
from rollstream.streams.codec import Envelope, record_hash
from rollstream.streams.records import Record, StepDone, Superseded, Take
from rollstream.streams.values import Address, AnnotationUsed, Member, Version

OFFENDERS_MAX = 10  # violations of one invariant whose places are kept
UNCHECKED_MAX = 10  # different reasons why a check was not possible
NOTES_MAX = 10  # of one kind
DERIVED = "derived"
"""Metadata key of a field that is computed from other fields; a verdict leaves it out."""

ResultState = Literal["kept", "violated", "unchecked"]


@dataclass(frozen=True, slots=True)
class Offender:
    """One violation: its place in a topic or its key in the store, and a description."""

    what: str
    topic: str = ""
    at: Address | None = None
    key: str = ""

    @property
    def where(self) -> str:
        if self.at is None:
            return self.key or self.topic
        return f"{self.topic} {self.at.partition}:{self.at.offset}"


@dataclass(slots=True)
class InvariantResult:
    """The counts, violations and impossible checks of one invariant. `number` 0 stands for the
    completeness of the data.
    """

    number: int
    title: str
    counts: Counter[str] = field(default_factory=Counter[str])
    violations: int = 0
    offenders: list[Offender] = field(default_factory=list[Offender])
    unchecked: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    """Observations that do not violate the invariant."""
    stored: int = 0
    """How many violations are of objects in the store."""

    def add_violation(
        self, what: str, topic: str = "", at: Address | None = None, *, key: str = ""
    ) -> None:
        self.violations += 1
        self.stored += bool(key)
        if len(self.offenders) < OFFENDERS_MAX:
            self.offenders.append(Offender(what, topic, at, key))

    def add_unchecked(self, what: str) -> None:
        """Record a check that was not possible; repeats are ignored."""
        if what not in self.unchecked and len(self.unchecked) < UNCHECKED_MAX:
            self.unchecked.append(what)

    def add_note(self, what: str, kind: str) -> None:
        """Count an observation under `kind`, and record the first `NOTES_MAX` of each kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= NOTES_MAX:
            self.notes.append(what)

    def withhold(self, why: str) -> None:
        """Mark the invariant as unchecked because the log cannot be judged (`why`): its violations
        in the log become notes, those in the store remain.
        """
        self.add_unchecked(why)
        self.notes += [f"not judged: {o.where}: {o.what}" for o in self.offenders if not o.key]
        self.offenders = [offender for offender in self.offenders if offender.key]
        self.violations = self.stored

    @property
    def state(self) -> ResultState:
        if self.violations:
            return "violated"
        return "unchecked" if self.unchecked else "kept"


class AuditMessage(msgspec.Struct, frozen=True, gc=False):
    """One message of a topic. `record` is None for unreadable bytes, with the `reason`. `envelope`
    identifies the writer of a single-holder role's record. `void`: the fence of invariant 7 drops
    it.
    """

    topic: str
    address: Address
    record: Record | None
    envelope: Envelope | None
    reason: str
    void: bool
    data: bytes

    @property
    def hash(self) -> str:
        return record_hash(self.data)


Completeness = Literal["whole", "archived", "part", "absent"]
"""`whole`: everything up to the log's end; `archived`: no log exists, and the archive may end
earlier in one topic than in another; `part`: some records are neither in the log nor archived;
`absent`: no records.
"""

Coverage = Mapping[str, Completeness]
"""The completeness of each topic, by the topic's name."""


def starts_complete(completeness: Completeness) -> bool:
    """Whether the topic is available from its first record on, without a gap."""
    return completeness in ("whole", "archived")


class RecordFold(Protocol):
    """A fold that checks one invariant or a part of it. The audit calls `apply` with every message
    of the fold's topics, and `finish` once at the end.
    """

    result: InvariantResult

    def apply(self, message: AuditMessage) -> None:
        """Apply the next message of a topic; those of one partition come in their order."""
        ...

    def finish(self, coverage: Coverage) -> None:
        """Run the checks that need the end of all topics."""
        ...


class NamedCompletion(msgspec.Struct, gc=False):
    """One completion that the ledger names, by its address and the hash of its bytes, with the
    first step and the take that trained it; 0 and None without one.
    """

    # Not tracked by the garbage collector (`gc=False`): a run has one of these per trajectory.
    group: int
    at: Address
    hash: str
    step: int = 0
    take: Address | None = None


@dataclass(slots=True)
class LedgerIndex:
    """Indexes takes and steps of the ledger as far as it was read. Void records are left out. A
    superseded take (invariant 12) counts as one that trained nothing.
    """

    uses: dict[str, NamedCompletion] = field(default_factory=dict[str, NamedCompletion])
    """The completions of every group that a take names, by trajectory."""
    notes: dict[tuple[str, str], AnnotationUsed] = field(
        default_factory=dict[tuple[str, str], AnnotationUsed]
    )
    """The annotations that takes used, by trajectory and name."""
    trained: Counter[int] = field(default_factory=Counter[int])
    """Number of trained trajectories, by step."""
    trained_of: Counter[int] = field(default_factory=Counter[int])
    """Number of trained trajectories, by group."""
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    """The version that each step made, by the first `StepDone` or take that names one."""
    begun: dict[tuple[int, int, int], tuple[Address, tuple[Member, ...]]] = field(
        default_factory=dict[tuple[int, int, int], tuple[Address, tuple[Member, ...]]]
    )
    """Address and trained members of each take of a step that is not done; by step, update,
    micro-batch.
    """
    highest: Counter[int] = field(default_factory=Counter[int])
    """By step, the highest believed version number when its groups were chosen."""
    first_step: int | None = None
    """The step of the first take that was read; all takes of later steps are available."""

    def apply(self, message: AuditMessage) -> None:
        if message.void or message.topic != "ledger":
            return
        match message.record:
            case Take() as take:
                self._take(take, message.address)
            case StepDone() as done:
                self.versions.setdefault(done.step, done.version)
                for key in [key for key in self.begun if key[0] <= done.step]:
                    del self.begun[key]
            case Superseded() as superseded:
                self._supersede(superseded)
            case _:
                pass

    def is_whole(self, step: int, *, ledger_whole: bool) -> bool:
        return ledger_whole or (self.first_step is not None and step > self.first_step)

    @property
    def believed(self) -> BelievedVersions:
        return BelievedVersions(
            max(self.versions, default=-1), believed_terms(self.versions.values())
        )

    def is_trained(self, trajectory: str, at: Address) -> bool:
        use = self.uses.get(trajectory)
        return use is not None and bool(use.step) and use.at == at

    def is_believed(self, version: Version) -> bool:
        """Whether the ledger has no other version of the same number."""
        return self.versions.get(version.number, version) == version

    def _take(self, take: Take, at: Address) -> None:
        if self.first_step is None:
            self.first_step = take.step
        uses, step = self.uses, take.step
        for group in take.groups:
            number = group.group
            for member in group.members:
                uses.setdefault(member.trajectory, NamedCompletion(number, member.at, member.hash))
        self.trained[step] += len(take.members)
        self.begun[step, take.update, take.micro_batch] = at, take.members
        if take.believed is not None:  # version 0 has no `StepDone`
            self.versions.setdefault(take.believed.number, take.believed)
            self.highest[step] = max(self.highest[step], take.believed.number)
        for member in take.members:
            use = uses.get(member.trajectory)
            if use is not None and not use.step:
                use.step, use.take = step, at
                self.trained_of[use.group] += 1
        for used in take.annotations:
            self.notes.setdefault((used.trajectory, used.name), used)

    def _supersede(self, record: Superseded) -> None:
        for micro_batch in record.micro_batches:
            key = (record.step, record.update, micro_batch)
            at, members = self.begun.pop(key, (None, ()))
            # These takes trained nothing, and a later take may train their members.
            self.trained[record.step] -= len(members)
            for member in members:
                use = self.uses.get(member.trajectory)
                if use is not None and use.take == at:
                    use.step, use.take = 0, None
                    self.trained_of[use.group] -= 1


def results_by_invariant(folds: Sequence[RecordFold], unknown: str) -> list[InvariantResult]:
    """Returns one result per invariant; folds may share one. `unknown` names a record that only a
    newer release understands, "" without one: it may change the meaning of all others, so no result
    is judged then.
    """
    results = {fold.result.number: fold.result for fold in folds}
    for result in results.values() if unknown else ():
        result.withhold(unknown)
    return [results[number] for number in sorted(results)]
