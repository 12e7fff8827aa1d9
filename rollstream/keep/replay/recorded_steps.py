"""The steps in a run's ledger, to be trained again: with the run's own rule and no filter in the
recorded micro-batches, sample for sample.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.trainer.data.poisoned_takes import SupersededTakes
from rollstream.errors import ConfigurationError, PositionLost
from rollstream.keep.source import RunSource
from rollstream.streams.admissible import believed_terms
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Configured, GroupClosed, StepDone, Superseded, Take
from rollstream.streams.values import Address


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step to train: its takes, the groups that it closes untrained, and whether it is the
    replay's last.
    """

    step: int
    takes: Sequence[Take]
    closed: Sequence[GroupClosed]
    is_last: bool
    done: StepDone | None = None
    """The last `StepDone` of this step in the replayed ledger, if any."""

    @property
    def trained(self) -> int:
        """Number of takes that train samples; superseded ones train none."""
        return sum(bool(take.members) for take in self.takes)


@dataclass(slots=True)
class RecordedSteps:
    """The ledger's records by step. A step that was trained again with another result (a fork) has
    several `done`.
    """

    takes: dict[int, list[Take]] = field(default_factory=dict[int, list[Take]])
    done: dict[int, list[StepDone]] = field(default_factory=dict[int, list[StepDone]])
    closed: dict[int, list[GroupClosed]] = field(default_factory=dict[int, list[GroupClosed]])
    superseded: SupersededTakes = field(default_factory=SupersededTakes)
    configured: list[Configured] = field(default_factory=list[Configured])

    def last(self) -> int:
        """Returns the last finished step; 0 if none."""
        return max(self.done, default=0)

    def has_state(self, done: StepDone) -> bool:
        """Whether the step was recorded with this state, at first or as a fork."""
        return any(recorded.has_same_state(done) for recorded in self.done.get(done.step, ()))

    def planned(self, steps: Iterable[int], last: int) -> Iterator[PlannedStep]:
        """Yields these steps as recorded; `last` is the replay's last step."""
        for step in steps:
            takes = [self.superseded.effective(take) for take in self.takes[step]]
            done = self.done[step][-1] if step in self.done else None
            yield PlannedStep(step, takes, self.closed.get(step, ()), step == last, done)

    def terms(self) -> tuple[tuple[int, int], ...]:
        """Returns `BelievedVersions.terms` of the recorded versions."""
        return believed_terms([done[0].version for done in self.done.values()])

    def step_of(self) -> dict[Address, int]:
        """Returns the step that trained each trajectory, by address."""
        return {
            member.at: step
            for step, takes in self.takes.items()
            for take in takes
            for member in self.superseded.effective(take).members
        }

    def check_whole(self, steps: Iterable[int]) -> None:
        """Raises `PositionLost` for the first of these steps without all takes that its `StepDone`
        counts.
        """
        for step in steps:
            stored_count = sum(
                not self.superseded.is_superseded(take) for take in self.takes.get(step, ())
            )
            recorded_count = self.done[step][-1].takes if step in self.done else None
            if stored_count != recorded_count:
                contents = (
                    "no StepDone"
                    if recorded_count is None
                    else f"{stored_count} of {recorded_count} takes"
                )
                raise PositionLost(
                    f"step {step} cannot be trained again: log and archive hold {contents} of it; "
                    "a run that truncates its log needs `archive.enabled = true` to be replayed "
                    "from there"
                )


def read_recorded(log: Bus) -> RecordedSteps:
    """Returns the ledger's records up to its present end."""
    recorded = RecordedSteps()
    reader = TopicReader(log, "ledger", from_begin(log, "ledger"))
    for received in reader.read_to(log.end("ledger")):
        match received.record:
            case Take() as take:
                recorded.takes.setdefault(take.step, []).append(take)
            case StepDone() as done:
                recorded.done.setdefault(done.step, []).append(done)
            case Superseded() as superseded:
                recorded.superseded.apply(superseded)
            case GroupClosed() as closed:
                recorded.closed.setdefault(closed.step, []).append(closed)
            case Configured() as configured:
                recorded.configured.append(configured)
            case _:
                pass
    return recorded


def steps_of_run(source: RunSource) -> RecordedSteps:
    """Returns the recorded steps of a run. Raises `ConfigurationError` without a ledger."""
    if not any(source.log.end("ledger").values()):
        raise ConfigurationError(
            f"{source.location.name} has no ledger, and only the ledger records what a step trained"
        )
    return read_recorded(source.log)
