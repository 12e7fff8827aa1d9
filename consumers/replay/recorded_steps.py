"""The steps that a replay trains: those of a run's ledger again (`RecordedSteps`), or new ones on
gathered trajectories alone (`OfflinePlan`). With the run's own rule and no filter the micro-batches
are the recorded ones, sample for sample.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.poisoned_takes import SupersededTakes
from rollstream.consumers.trainer.data.prepare import PreparedGroup, prepare_group
from rollstream.consumers.trainer.data.recorded_groups import fetch_annotations, fetch_group
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.selection import groups_of_update, pack_micro_batches
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.errors import PositionLost
from rollstream.streams.admissible import BelievedVersions, believed_terms, is_usable_annotation
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import (
    Annotation,
    Configured,
    GroupClosed,
    StepDone,
    Superseded,
    Take,
    Trajectory,
)
from rollstream.streams.values import Address, AnnotationUsed, GroupMembers, Member


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step to train: its takes, the groups that it closes untrained, and whether it is the
    replay's last.
    """

    step: int
    takes: Sequence[Take]
    closed: Sequence[GroupClosed]
    is_last: bool
    terms: tuple[tuple[int, int], ...] = ()
    """`BelievedVersions.terms`."""
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
        firsts = [done[0].version for done in self.done.values()]
        terms = believed_terms(firsts)
        for step in steps:
            takes = [self.superseded.effective(take) for take in self.takes[step]]
            done = self.done[step][-1] if step in self.done else None
            yield PlannedStep(step, takes, self.closed.get(step, ()), step == last, terms, done)

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


@dataclass(frozen=True, slots=True)
class ReplayCourse:
    """Settings and rule under which steps are trained; `keep(trajectory, version)` returns whether
    a step that is trained from `version` may use the trajectory.
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
    """Yields the micro-batches of one update of the planned step, those that its `takes` name less
    the samples that rule or filter leave out. Raises `ValueError` if a trajectory has another hash
    than recorded, `PositionLost` if a record is missing.
    """
    samples: dict[str, Sample] = {}
    for take in takes:
        for group in take.groups:
            group_samples = _samples_of(log, take, group, course, planned, step_metrics)
            samples |= {sample.trajectory: sample for sample in group_samples}
        names = [member.trajectory for member in take.members]
        batch = [samples.pop(name) for name in names if name in samples]
        if batch:
            yield batch
    # Samples that only another rule trains, as under a larger `max_lag`.
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
    selected_records = [record for record in records if course.keep(record, version)]
    step_metrics.counts["filtered_out"] += len(records) - len(selected_records)
    if not selected_records:
        step_metrics.add_closed("filtered", {})
        return ()
    prepared = prepare_group(
        group.group, selected_records, annotations, course.rule, version, believed
    )
    if prepared.ending:
        step_metrics.add_closed(prepared.ending, prepared.counts, selected_records)
        return ()
    step_metrics.add_trained(selected_records, prepared.samples, prepared.counts)
    step_metrics.add_consumed(prepared.samples, version)
    return prepared.samples


@dataclass(slots=True)
class OfflineIndex:
    """Addresses and hashes of the trajectories and annotations in a gathered log by group, numbered
    from 0 without a gap.
    """

    members: dict[int, list[Member]] = field(default_factory=dict[int, list[Member]])
    notes: dict[int, dict[tuple[str, str], AnnotationUsed]] = field(
        default_factory=dict[int, dict[tuple[str, str], AnnotationUsed]]
    )


def index_log(log: Bus, names: Sequence[str]) -> OfflineIndex:
    """Indexes a log that `gather_sources` wrote; of annotations the first usable one of each
    trajectory and of these names.
    """
    index = OfflineIndex()
    for received in _all_records(log, "trajectories"):
        record = received.record
        if isinstance(record, Trajectory):
            member = Member(record.trajectory, received.address, received.hash)
            index.members.setdefault(record.group, []).append(member)
    for received in _all_records(log, "annotations"):
        note = received.record
        if isinstance(note, Annotation) and note.name in names and is_usable_annotation(note):
            used = AnnotationUsed(note.trajectory, note.name, received.address, received.hash)
            index.notes.setdefault(note.group, {}).setdefault((note.trajectory, note.name), used)
    return index


def groups_used(recorded: RecordedSteps, step: int) -> int:
    """Returns the number of groups that an offline training used (trained or closed) in the steps
    up to this one, in the order of their numbers.
    """
    taken = (
        group.group
        for number, takes in recorded.takes.items()
        if number <= step
        for take in takes
        for group in take.groups
    )
    closed = (
        closing.group
        for number, closings in recorded.closed.items()
        if number <= step
        for closing in closings
    )
    return max((*taken, *closed), default=-1) + 1


@dataclass(slots=True)
class OfflinePlan:
    """Plans steps from group `group` on: each group once, in the order of numbers,
    `groups_per_step` a step. A group that cannot be trained is closed in the ledger, as in live
    training. `left_over` is the number of unused groups once `steps` has ended.
    """

    log: Bus
    index: OfflineIndex
    course: ReplayCourse
    group: int
    left_over: int = 0

    def steps(self, after: int, last: int) -> Iterator[PlannedStep]:
        """Yields the steps after `after`, up to `last` or until too few groups are left."""
        planned = self._step(after + 1) if after < last else None
        while planned is not None:
            following = self._step(planned.step + 1) if planned.step < last else None
            yield replace(planned, is_last=following is None)
            planned = following
        self.left_over = len(self.index.members) - self.group

    def _step(self, step: int) -> PlannedStep | None:
        ready: list[PreparedGroup] = []
        closed: list[GroupClosed] = []
        group, groups_per_step = self.group, self.course.settings.groups_per_step
        while len(ready) < groups_per_step:
            # Too few groups are left: none is used.
            if group not in self.index.members:
                return None
            prepared = self._prepared(group, step - 1)
            if prepared.ending:
                closed.append(GroupClosed(group, prepared.ending, prepared.detail, step))
            else:
                ready.append(prepared)
            group += 1
        self.group = group
        return PlannedStep(step, self._takes(step, ready), closed, False)

    def _prepared(self, group: int, version: int) -> PreparedGroup:
        records = [received.record for received in fetch_group(self.log, self.index.members[group])]
        annotations = fetch_annotations(self.log, self._notes(group))
        return prepare_group(group, records, annotations, self.course.rule, version)

    def _notes(self, group: int) -> tuple[AnnotationUsed, ...]:
        return tuple(self.index.notes.get(group, {}).values())

    def _takes(self, step: int, ready: Sequence[PreparedGroup]) -> list[Take]:
        settings = self.course.settings
        takes: list[Take] = []
        first = 0
        for update in range(settings.updates_per_step):
            count = groups_of_update(update, len(ready), settings.updates_per_step)
            takes += self._of_update(step, update, ready[first : first + count])
            first += count
        return takes

    def _of_update(self, step: int, update: int, ready: Sequence[PreparedGroup]) -> Iterator[Take]:
        new_groups = {prepared.group: prepared for prepared in ready}
        at = {m.trajectory: m for group in new_groups for m in self.index.members[group]}
        samples = [sample for prepared in ready for sample in prepared.samples]
        for number, batch in enumerate(
            pack_micro_batches(samples, self.course.settings.micro_batch_tokens)
        ):
            firsts = [new_groups.pop(s.group).group for s in batch if s.group in new_groups]
            yield Take(
                step=step,
                update=update,
                micro_batch=number,
                members=tuple(at[sample.trajectory] for sample in batch),
                groups=tuple(GroupMembers(g, tuple(self.index.members[g])) for g in firsts),
                annotations=tuple(note for g in firsts for note in self._notes(g)),
            )


def _all_records(log: Bus, topic: str) -> Iterator[Received]:
    reader = TopicReader(log, topic, from_begin(log, topic))
    while received := reader.poll():
        yield from received
