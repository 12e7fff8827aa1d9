"""Plans the steps of a training on gathered trajectories alone (`gathering`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollstream.consumers.trainer.data.prepare import PreparedGroup, prepare_group
from rollstream.consumers.trainer.data.recorded_groups import fetch_annotations, fetch_group
from rollstream.consumers.trainer.data.selection import groups_of_update, pack_micro_batches
from rollstream.keep.replay.recorded_steps import PlannedStep, RecordedSteps
from rollstream.keep.replay.training import ReplayCourse
from rollstream.streams.admissible import is_usable_annotation
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import Annotation, GroupClosed, Take, Trajectory
from rollstream.streams.values import AnnotationUsed, GroupMembers, Member


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
        arrived = fetch_group(self.log, self.index.members[group])
        records = [completion.record for completion in arrived]
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
