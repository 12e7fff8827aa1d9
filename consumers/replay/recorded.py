"""What a run's ledger says of its steps: what a replay trains again and is held to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from streams.bus import Bus
from streams.errors import PositionLost
from streams.reader import TopicReader, from_begin
from streams.records import Configured, GroupClosed, StepDone, Take


@dataclass(slots=True)
class RecordedSteps:
    """By step; a step that was trained again as a fork has several `done`."""

    takes: dict[int, list[Take]] = field(default_factory=dict[int, list[Take]])
    done: dict[int, list[StepDone]] = field(default_factory=dict[int, list[StepDone]])
    closed: dict[int, list[GroupClosed]] = field(default_factory=dict[int, list[GroupClosed]])
    configured: list[Configured] = field(default_factory=list[Configured])

    def last(self) -> int:
        """The last step that is done, 0 if none is."""
        return max(self.done, default=0)

    def hashes(self, step: int) -> set[str]:
        return {done.state_hash for done in self.done.get(step, ())}

    def check_whole(self, steps: Iterable[int]) -> None:
        """`PositionLost` names the first step whose takes are not all here."""
        for step in steps:
            here = len(self.takes.get(step, ()))
            wanted = self.done[step][-1].takes if step in self.done else None
            if here != wanted:
                said = "no StepDone" if wanted is None else f"{here} of {wanted} takes"
                raise PositionLost(
                    f"step {step} cannot be trained again: log and archive hold {said} of it; "
                    "a run that forgets needs `archive.enabled = true` to be replayed from there"
                )


def read_recorded(log: Bus) -> RecordedSteps:
    """The ledger up to its present end."""
    found = RecordedSteps()
    reader = TopicReader(log, "ledger", from_begin(log, "ledger"))
    for received in reader.read_to(log.end("ledger")):
        match received.record:
            case Take() as take:
                found.takes.setdefault(take.step, []).append(take)
            case StepDone() as done:
                found.done.setdefault(done.step, []).append(done)
            case GroupClosed() as closed:
                found.closed.setdefault(closed.step, []).append(closed)
            case Configured() as configured:
                found.configured.append(configured)
            case _:
                pass
    return found
