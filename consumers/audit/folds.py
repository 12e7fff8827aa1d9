"""An index of the ledger's takes and steps, for the checks of other topics.

Grows with the run: an entry per trajectory of a trained group (about 0.3 KiB), a few bytes per
step.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from rollstream.consumers.audit.seen import AuditMessage
from rollstream.streams.admissible import BelievedVersions, believed_terms
from rollstream.streams.values import Address, AnnotationUsed, Member, Version
from rollstream.streams.records import StepDone, Superseded, Take


class NamedCompletion(msgspec.Struct, gc=False):
    """One completion that the ledger names. `step` is the step that trained it first, by the take
    at address `take`; 0 and None if none did. Not tracked by the garbage collector, because there
    is one per trajectory.
    """

    group: int
    at: Address
    hash: str
    step: int = 0
    take: Address | None = None


@dataclass(slots=True)
class LedgerIndex:
    """Void records and the content of superseded takes are skipped."""

    uses: dict[str, NamedCompletion] = field(default_factory=dict[str, NamedCompletion])
    """By trajectory: all members of groups that a take began."""
    notes: dict[tuple[str, str], AnnotationUsed] = field(
        default_factory=dict[tuple[str, str], AnnotationUsed]
    )
    trained: Counter[int] = field(default_factory=Counter[int])
    """Trajectories by step."""
    trained_of: Counter[int] = field(default_factory=Counter[int])
    """Trajectories by group."""
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    """The version that each step made, by the first `StepDone` of the step."""
    begun: dict[tuple[int, int, int], tuple[Address, tuple[Member, ...]]] = field(
        default_factory=dict[tuple[int, int, int], tuple[Address, tuple[Member, ...]]]
    )
    """Takes of steps that are not done, which may still be superseded, and the members that they
    train.
    """
    highest: Counter[int] = field(default_factory=Counter[int])
    """By step, the number of the highest believed version when its groups were fixed."""
    first_step: int | None = None
    """The first step that a take names: of all later steps every take is available."""

    def apply(self, seen: AuditMessage) -> None:
        if seen.void or seen.topic != "ledger":
            return
        match seen.record:
            case Take() as take:
                self._take(take, seen.address)
            case StepDone() as done:
                self.versions.setdefault(done.step, done.version)
                for key in [key for key in self.begun if key[0] <= done.step]:
                    del self.begun[key]
            case Superseded() as superseded:
                self._supersede(superseded)
            case _:
                pass

    def is_whole(self, step: int, *, ledger_whole: bool) -> bool:
        """Whether every take of the step is available."""
        return ledger_whole or (self.first_step is not None and step > self.first_step)

    @property
    def believed(self) -> BelievedVersions:
        """The published versions with their terms."""
        return BelievedVersions(max(self.versions, default=-1), believed_terms(self.versions.values()))

    def is_trained(self, trajectory: str, at: Address) -> bool:
        """Whether a step trained the completion at this address."""
        use = self.uses.get(trajectory)
        return use is not None and bool(use.step) and use.at == at

    def is_believed(self, version: Version) -> bool:
        """False for a version if the ledger has another one of the same number."""
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
        """Undo these takes: they trained nothing, and a later take may train their members."""
        for micro_batch in record.micro_batches:
            key = (record.step, record.update, micro_batch)
            at, members = self.begun.pop(key, (None, ()))
            self.trained[record.step] -= len(members)
            for member in members:
                use = self.uses.get(member.trajectory)
                if use is not None and use.take == at:
                    use.step, use.take = 0, None
                    self.trained_of[use.group] -= 1
