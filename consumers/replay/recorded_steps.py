"""The steps that a run's ledger records: the input of a replay and the results it is compared
with.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.trainer.data.poisoned_takes import SupersededTakes
from rollstream.streams.admissible import believed_terms
from rollstream.streams.bus import Bus
from rollstream.errors import PositionLost
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.values import Address
from rollstream.streams.records import Configured, GroupClosed, StepDone, Superseded, Take


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step to train: its takes, and the groups that it closes untrained."""

    step: int
    takes: Sequence[Take]
    closed: Sequence[GroupClosed]
    is_last: bool
    terms: tuple[tuple[int, int], ...] = ()
    """Which term published which version (`Believed.terms`)."""

    @property
    def trained(self) -> int:
        """Number of takes that train samples; superseded ones do not."""
        return sum(bool(take.members) for take in self.takes)


@dataclass(slots=True)
class RecordedSteps:
    """The ledger's records by step; a step that was trained again as a fork has several `done`."""

    takes: dict[int, list[Take]] = field(default_factory=dict[int, list[Take]])
    done: dict[int, list[StepDone]] = field(default_factory=dict[int, list[StepDone]])
    closed: dict[int, list[GroupClosed]] = field(default_factory=dict[int, list[GroupClosed]])
    voided: SupersededTakes = field(default_factory=SupersededTakes)
    configured: list[Configured] = field(default_factory=list[Configured])

    def last(self) -> int:
        """The last finished step, 0 if there is none."""
        return max(self.done, default=0)

    def hashes(self, step: int) -> set[str]:
        return {done.state_hash for done in self.done.get(step, ())}

    def planned(self, steps: Iterable[int], last: int) -> Iterator[PlannedStep]:
        """These steps as they were recorded; `last` is the last step of the replay."""
        firsts = [done[0].version for done in self.done.values()]
        terms = believed_terms(firsts)
        for step in steps:
            takes = [self.voided.effective(take) for take in self.takes[step]]
            yield PlannedStep(step, takes, self.closed.get(step, ()), step == last, terms)

    def step_of(self) -> dict[Address, int]:
        """Address of a trajectory → the step that trained it."""
        return {
            member.at: step
            for step, takes in self.takes.items()
            for take in takes
            for member in self.voided.effective(take).members
        }

    def check_whole(self, steps: Iterable[int]) -> None:
        """Raise `PositionLost` for the first step whose takes are not all available."""
        for step in steps:
            here = sum(not self.voided.is_superseded(take) for take in self.takes.get(step, ()))
            wanted = self.done[step][-1].takes if step in self.done else None
            if here != wanted:
                said = "no StepDone" if wanted is None else f"{here} of {wanted} takes"
                raise PositionLost(
                    f"step {step} cannot be trained again: log and archive hold {said} of it; a "
                    "run that truncates its log needs `archive.enabled = true` to be replayed "
                    "from there"
                )


def read_recorded(log: Bus) -> RecordedSteps:
    """Read the ledger up to its present end."""
    found = RecordedSteps()
    reader = TopicReader(log, "ledger", from_begin(log, "ledger"))
    for received in reader.read_to(log.end("ledger")):
        match received.record:
            case Take() as take:
                found.takes.setdefault(take.step, []).append(take)
            case StepDone() as done:
                found.done.setdefault(done.step, []).append(done)
            case Superseded() as superseded:
                found.voided.apply(superseded)
            case GroupClosed() as closed:
                found.closed.setdefault(closed.step, []).append(closed)
            case Configured() as configured:
                found.configured.append(configured)
            case _:
                pass
    return found
