"""The steps that a run's ledger records, and their micro-batches under the rule and the filter of a
replay.

With the run's own rule and no filter the micro-batches are the recorded ones, sample for sample.
Samples that another rule adds to the recorded takes (a larger `max_lag`) are packed into further
micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.groups import fetch_annotations, fetch_group
from rollstream.consumers.trainer.data.poisoned_takes import SupersededTakes
from rollstream.consumers.trainer.data.prepare import TrainingRule, prepare_group
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.selection import pack_micro_batches
from rollstream.consumers.trainer.metrics import StepMetrics
from rollstream.errors import PositionLost
from rollstream.streams.admissible import BelievedVersions, believed_terms
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import (
    Configured,
    GroupClosed,
    StepDone,
    Superseded,
    Take,
    Trajectory,
)
from rollstream.streams.values import Address, GroupMembers


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step to train: its takes, and the groups that it closes untrained."""

    step: int
    takes: Sequence[Take]
    closed: Sequence[GroupClosed]
    is_last: bool
    terms: tuple[tuple[int, int], ...] = ()
    """Which term published which version (`BelievedVersions.terms`)."""

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
    superseded: SupersededTakes = field(default_factory=SupersededTakes)
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
            takes = [self.superseded.effective(take) for take in self.takes[step]]
            yield PlannedStep(step, takes, self.closed.get(step, ()), step == last, terms)

    def step_of(self) -> dict[Address, int]:
        """Address of a trajectory → the step that trained it."""
        return {
            member.at: step
            for step, takes in self.takes.items()
            for take in takes
            for member in self.superseded.effective(take).members
        }

    def check_whole(self, steps: Iterable[int]) -> None:
        """Raise `PositionLost` for the first step whose takes are not all available."""
        for step in steps:
            here = sum(not self.superseded.is_superseded(take) for take in self.takes.get(step, ()))
            wanted = self.done[step][-1].takes if step in self.done else None
            if here != wanted:
                held = "no StepDone" if wanted is None else f"{here} of {wanted} takes"
                raise PositionLost(
                    f"step {step} cannot be trained again: log and archive hold {held} of it; a "
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
                found.superseded.apply(superseded)
            case GroupClosed() as closed:
                found.closed.setdefault(closed.step, []).append(closed)
            case Configured() as configured:
                found.configured.append(configured)
            case _:
                pass
    return found


@dataclass(frozen=True, slots=True)
class ReplayCourse:
    """The settings and the rule under which steps are trained. `keep(trajectory, version)` is the
    filter of the trajectories for a step trained from `version`.
    """

    settings: TrainerSettings
    rule: TrainingRule
    keep: Callable[[Trajectory, int], bool] = lambda record, version: True


def replay_batches(
    log: Bus,
    takes: Sequence[Take],
    course: ReplayCourse,
    planned: PlannedStep,
    step_metrics: StepMetrics,
) -> Iterator[list[Sample]]:
    """Yield the micro-batches of one update of the planned step. Raises `ValueError` for bytes that
    differ from the ledger's record, `PositionLost` for a missing record.
    """
    samples: dict[str, Sample] = {}
    for take in takes:
        for group in take.groups:
            found = _samples_of(log, take, group, course, planned, step_metrics)
            samples |= {sample.trajectory: sample for sample in found}
        named = [member.trajectory for member in take.members]
        batch = [samples.pop(name) for name in named if name in samples]
        if batch:
            yield batch
    for more in pack_micro_batches(list(samples.values()), course.settings.micro_batch_tokens):
        yield list(more)


def _samples_of(
    log: Bus,
    take: Take,
    group: GroupMembers,
    course: ReplayCourse,
    planned: PlannedStep,
    step_metrics: StepMetrics,
) -> Sequence[Sample]:
    version = planned.step - 1
    believed = BelievedVersions(0, planned.terms).up_to(take.believed)
    annotations = fetch_annotations(log, take.annotations)
    records = [arrived.record for arrived in fetch_group(log, group.members)]
    kept = [record for record in records if course.keep(record, version)]
    step_metrics.counts["filtered_out"] += len(records) - len(kept)
    if not kept:
        step_metrics.add_closed("filtered", {})
        return ()
    prepared = prepare_group(group.group, kept, annotations, course.rule, version, believed)
    if prepared.ending:
        step_metrics.add_closed(prepared.ending, prepared.counts, kept)
        return ()
    step_metrics.add_trained(kept, prepared.samples, prepared.counts)
    step_metrics.add_consumed(prepared.samples, version)
    return prepared.samples
