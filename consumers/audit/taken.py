"""What the ledger says was taken and done, as the checks of other topics need it.

Grows with the run: an entry per trajectory of a trained group (about 0.3 KiB), a few bytes per
step.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from consumers.audit.seen import Seen
from streams.records import Address, AnnotationUsed, StepDone, Take, Version


class Use(msgspec.Struct, gc=False):
    """One completion that the ledger names; `step` trained it first, by the take that lies at
    `take`; 0 and None where none did. A struct that is not collected: there are as many as
    trajectories.
    """

    group: int
    at: Address
    hash: str
    step: int = 0
    take: Address | None = None


@dataclass(slots=True)
class Taken:
    """Void records are passed over."""

    uses: dict[str, Use] = field(default_factory=dict[str, Use])
    """By trajectory: all members of groups that were begun."""
    notes: dict[tuple[str, str], AnnotationUsed] = field(
        default_factory=dict[tuple[str, str], AnnotationUsed]
    )
    trained: Counter[int] = field(default_factory=Counter[int])
    """Trajectories by step."""
    trained_of: Counter[int] = field(default_factory=Counter[int])
    """Trajectories by group."""
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    """The version that each step made, as the first `StepDone` of it says."""
    first_step: int | None = None
    """The first step that a take names: all of those after it are here whole."""

    def apply(self, seen: Seen) -> None:
        if seen.void or seen.topic != "ledger":
            return
        match seen.record:
            case Take() as take:
                self._take(take, seen.address)
            case StepDone() as done:
                self.versions.setdefault(done.step, done.version)
            case _:
                pass

    def is_whole(self, step: int, *, ledger_whole: bool) -> bool:
        """Whether every take of the step is here."""
        return ledger_whole or (self.first_step is not None and step > self.first_step)

    def is_believed(self, version: Version) -> bool:
        """False for a version in whose place the ledger has another one."""
        return self.versions.get(version.number, version) == version

    def _take(self, take: Take, at: Address) -> None:
        if self.first_step is None:
            self.first_step = take.step
        uses, step = self.uses, take.step
        for group in take.groups:
            number = group.group
            for member in group.members:
                uses.setdefault(member.trajectory, Use(number, member.at, member.hash))
        self.trained[step] += len(take.members)
        for member in take.members:
            use = uses.get(member.trajectory)
            if use is not None and not use.step:
                use.step, use.take = step, at
                self.trained_of[use.group] += 1
        for used in take.annotations:
            self.notes.setdefault((used.trajectory, used.name), used)
