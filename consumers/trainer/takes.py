"""Gives the learner its data take by take: `TakeRepeater` trains the ledger's takes, `TakeFeeder`
also makes takes of ready groups, each in the ledger before it is trained. A successor finishes a
dead trainer's step on the same samples, each used at most once (invariant 2).

Reading list: after `consumers/trainer/data/prepare.py`, before `consumers/trainer/ledger.py`.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data import selection
from rollstream.consumers.trainer.data.groups import GroupIntake, ReceivedCompletion, TrainerGroup
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.poisoned_takes import (
    ComputeFailed,
    TakeKey,
    TakeNumber,
    error_text,
    number_of,
)
from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.ready_groups import (
    ReadyGroup,
    UntrainedGroups,
    candidate_of,
    closed_record,
    members_of,
)
from rollstream.consumers.trainer.data.recorded_groups import fetch_annotations, fetch_group
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.consumers.trainer.learn.base import Learner
from rollstream.consumers.trainer.learn.workers import is_out_of_memory
from rollstream.consumers.trainer.ledger import Ledger, LedgerTail
from rollstream.streams.admissible import BelievedVersions
from rollstream.streams.bus import Bus
from rollstream.streams.records import (
    GroupClosed,
    Take,
    TakeFailed,
    TakeRetried,
    TakesRepeated,
)
from rollstream.streams.values import Member, Version

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TakeRepeater(ABC):
    """Trains takes of the ledger on the records that they name, during one term: those of a dead
    trainer, or on other ranks those of rank 0 (`sharded/follower.py`).
    """

    bus: Bus
    settings: TrainerSettings
    rule: TrainingRule
    learner: Learner
    terms: tuple[tuple[int, int], ...] = ()
    """Pairs (first version number, term) up to this term (`BelievedVersions.terms`)."""
    out_of_memory: Mapping[TakeNumber, int] = field(default_factory=dict[TakeNumber, int])
    """How often memory ran out on each recorded take before (`TakeAttempts`)."""
    earlier_rules: Mapping[TakeNumber, TrainingRule] = field(
        default_factory=dict[TakeNumber, TrainingRule]
    )
    """The rules of recorded takes that are not repeated under `rule`."""
    _submitted: list[TakeKey] = field(default_factory=list[TakeKey])
    """The present step's takes in the order of submission."""
    _kept: list[tuple[TakeKey, list[Sample]]] = field(
        default_factory=list[tuple[TakeKey, list[Sample]]]
    )
    """The present step's samples, if further epochs train them again."""
    _samples: dict[str, Sample] = field(default_factory=dict[str, Sample])
    """Pending samples by trajectory: of taken groups, in no take yet."""
    _members: dict[str, Member] = field(default_factory=dict[str, Member])

    @abstractmethod
    def read(self, wait_s: float = 0.0) -> None:
        """Reads new records; returns once some came or `wait_s` has passed."""

    @abstractmethod
    def take_ready(
        self, progress: selection.UpdateProgress, step_metrics: StepMetrics, now_s: float
    ) -> int:
        """Trains the ready data of this update; returns 0 if there was none."""

    def repeat_recorded(
        self, recorded: LedgerTail, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        """Trains the takes of this update that the ledger held when the term began, and removes
        them from `recorded`.
        """
        for take in recorded.takes.pop((progress.step, progress.update), []):
            self.repeat(take, progress, step_metrics)

    def train_again(self, step: int, update: int, epoch: int, recorded: LedgerTail) -> None:
        """Trains all takes of a finished update once more, as its `epoch` (1: the first
        repetition).
        """
        takes = [(key, samples) for key, samples in self._kept if key[:2] == (step, update)]
        numbers = tuple(number for key, _ in takes for number in key[2])
        # Recorded before it is trained, unless an earlier term did.
        if recorded.repeated.get((step, update, epoch)) != numbers:
            self.record_repetition(TakesRepeated(step, update, epoch, numbers))
        for key, samples in takes:
            self._submitted.append(key)
            self.learner.submit(samples)

    @abstractmethod
    def record_repetition(self, repetition: TakesRepeated) -> None:
        """Records that an update is trained once more."""

    @abstractmethod
    def record_failure(self, failed: ComputeFailed) -> None:
        """Records the takes on which the learner failed, before this process ends."""

    def failures(self, failed: ComputeFailed) -> list[TakeFailed]:
        """Returns the ledger records of the takes on which the learner failed, and logs them."""
        tried = [self._submitted[number] for number in failed.micro_batches]
        cause = failed.__cause__ or failed
        error, is_short = error_text(cause), is_out_of_memory(cause)
        records: list[TakeFailed] = []
        for step, update in sorted({key[:2] for key in tried}):
            numbers = tuple(n for key in tried if key[:2] == (step, update) for n in key[2])
            log.error("step %d: take %s cannot be computed: %s", step, numbers, error)
            records.append(TakeFailed(step, update, numbers, error, is_short))
        return records

    def repeat(
        self, take: Take, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        self._repeat_groups(take, progress, step_metrics)
        self._repeat(take, progress)

    def _repeat_groups(
        self, take: Take, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        # From what the take names, so that the samples are the same.
        annotations = fetch_annotations(self.bus, take.annotations)
        believed = BelievedVersions(0, self.terms).up_to(take.believed)
        rule = self.earlier_rules.get(number_of(take), self.rule)
        for group in take.groups:
            arrived = self.selected(fetch_group(self.bus, group.members), progress, step_metrics)
            records = [a.record for a in arrived]
            prepared = prepare_group(
                group.group, records, annotations, rule, progress.version, believed
            )
            ready = ReadyGroup(tuple(arrived), take.annotations, prepared)
            if prepared.ending:  # under settings that were changed since
                self.leave_out(ready, step_metrics)
                progress.take_group(group.group, [])
            else:
                self._take_group(ready, progress, step_metrics)

    def selected(
        self,
        arrived: list[ReceivedCompletion],
        progress: selection.UpdateProgress,
        step_metrics: StepMetrics,
    ) -> list[ReceivedCompletion]:
        """Returns the completions of a recorded group that may be trained: all."""
        return arrived

    def leave_out(self, ready: ReadyGroup, step_metrics: StepMetrics) -> None:
        """Reports a recorded group that trains no sample in its repetition."""
        prepared = ready.prepared
        log.warning("group %d trains no sample now: %s", prepared.group, prepared.detail)

    def drop_samples(self, step: int, dropped: int) -> None:
        """Reports how many samples of a recorded take its repetition does not train."""
        log.warning("step %d: %d recorded samples dropped", step, dropped)

    def _repeat(self, take: Take, progress: selection.UpdateProgress) -> None:
        trajectories = [member.trajectory for member in take.members]
        present = [trajectory for trajectory in trajectories if trajectory in progress.pending]
        # The present rule may no longer train some of them.
        if len(present) < len(trajectories):
            self.drop_samples(take.step, len(trajectories) - len(present))
        if present:
            self._train(present, progress, take.micro_batch)
        else:
            progress.skip_take()

    def _take_group(
        self, ready: ReadyGroup, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        samples = ready.prepared.samples
        progress.take_group(ready.prepared.group, [s.trajectory for s in samples])
        self._samples.update({s.trajectory: s for s in samples})
        members = {a.member.trajectory: a.member for a in ready.arrived}
        self._members.update({s.trajectory: members[s.trajectory] for s in samples})
        step_metrics.add_trained([a.record for a in ready.arrived], samples, ready.prepared.counts)
        step_metrics.add_consumed(samples, progress.version)

    def _train(
        self, trajectories: list[str], progress: selection.UpdateProgress, micro_batch: int
    ) -> None:
        progress.use(trajectories)
        if self._submitted and self._submitted[0][0] != progress.step:
            self._submitted.clear()
            self._kept.clear()
        key = (progress.step, progress.update, (micro_batch,))
        self._submitted.append(key)
        shortages = self.out_of_memory.get((progress.step, progress.update, micro_batch), 0)
        samples = [self._samples.pop(t) for t in trajectories]
        if self.settings.epochs > 1:
            self._kept.append((key, samples))
        self.learner.submit(samples, shortages)
        for trajectory in trajectories:
            self._members.pop(trajectory)


@dataclass(slots=True, kw_only=True)
class TakeFeeder(TakeRepeater):
    """Feeds the trainer during one term: repeats recorded takes, then makes new ones of ready
    groups. `choose` selects among these.
    """

    choose: selection.GroupChoice
    intake: GroupIntake
    ledger: Ledger
    annotation_watch: selection.AnnotationWatch
    believed: Callable[[], Version | None]
    """Returns the highest believed version, which the publisher's thread advances."""
    _prepared: dict[int, ReadyGroup] = field(default_factory=dict[int, ReadyGroup])
    # Version trained from, and highest believed version, of `_prepared`: a waiting group is not
    # prepared again at every poll.
    _prepared_for: tuple[int, Version | None] = (-1, None)
    _untrained: UntrainedGroups = field(default_factory=UntrainedGroups)
    _failing: threading.Lock = field(default_factory=threading.Lock)
    _has_failed: bool = False

    def read(self, wait_s: float = 0.0) -> None:
        self.intake.read(wait_s)

    def repeat_recorded(
        self, recorded: LedgerTail, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        """Trains the takes of this update that the ledger held when the term began."""
        is_unfinished = progress.step not in recorded.done
        takes = recorded.takes.pop((progress.step, progress.update), [])
        for take in takes:
            self._repeat_groups(take, progress, step_metrics)
            # If the trainer dies within the take, this marker is its last record, so the next
            # trainer can count the death (`poisoned_takes.py`).
            if is_unfinished and take.members:
                self.ledger.append([TakeRetried(take.step, take.update, take.micro_batch)])
            self._repeat(take, progress)
            if is_unfinished:
                self.learner.settle()
        # A marker without a micro-batch: a death after it does not count.
        if takes and is_unfinished:
            self.ledger.append([TakeRetried(progress.step, progress.update, None)])

    def record_repetition(self, repetition: TakesRepeated) -> None:
        self.ledger.append([repetition])

    def record_failure(self, failed: ComputeFailed) -> None:
        self.append_failures(self.failures(failed))

    def append_failures(self, failures: Sequence[TakeFailed]) -> None:
        """Appends the takes on which this rank or another one failed; thread-safe."""
        # The first call alone, as the term ends with it: memory that ends on two ranks in one round
        # is one failed attempt.
        with self._failing:
            if not self._has_failed:
                self.ledger.append(failures)
            self._has_failed = True

    def take_ready(
        self, progress: selection.UpdateProgress, step_metrics: StepMetrics, now_s: float
    ) -> int:
        """Takes ready groups, and trains their takes, if they complete the update or fill a
        micro-batch (`worth_taking`). Closes groups that end untrained. Returns the number of groups
        taken.
        """
        step_metrics.count_refused_annotations(self.intake.take_refused_annotations())
        # Read once: the take records the version under which its groups were prepared.
        believed = self.believed()
        ready = self._ready(progress, believed, step_metrics, now_s)
        tokens = sum(r.tokens for r in ready.values())
        full = self.settings.micro_batch_tokens
        chosen: Sequence[int] = ()
        if selection.worth_taking(progress.groups_left, len(ready), tokens, full):
            candidates = [candidate_of(r) for r in ready.values()]
            chosen = self.choose(candidates, progress.groups_left)
        for group in chosen:
            self.intake.end(group)
            del self._prepared[group]
            self._take_group(ready[group], progress, step_metrics)
        self._write(progress, [ready[group] for group in chosen], believed)
        return len(chosen)

    def _ready(
        self,
        progress: selection.UpdateProgress,
        believed: Version | None,
        step_metrics: StepMetrics,
        now_s: float,
    ) -> dict[int, ReadyGroup]:
        ready: dict[int, ReadyGroup] = {}
        closed: list[GroupClosed] = []
        waiting = 0
        for number, group in list(self.intake.open.items()):
            if not group.is_complete() and not group.is_overdue(now_s):
                waiting += group.is_finished()
                continue
            ready_group = self._prepare_once(number, group, (progress.version, believed))
            if not ready_group.prepared.ending:
                ready[number] = ready_group
                continue
            closed.append(closed_record(number, group, ready_group.prepared, progress.step))
            records = [a.record for a in ready_group.arrived]
            step_metrics.add_closed(closed[-1].reason, ready_group.prepared.counts, records)
            self.intake.end(number)
        self.ledger.append(closed)
        self._untrained.check(closed, bool(ready), self.settings.groups_per_step)
        self.annotation_watch.check(waiting, self.intake.annotated_s, now_s)
        return ready

    def _prepare_once(
        self, number: int, group: TrainerGroup, under: tuple[int, Version | None]
    ) -> ReadyGroup:
        # Lag and masks depend on both parts of `under`.
        if under != self._prepared_for:
            self._prepared, self._prepared_for = {}, under
        ready_group = self._prepared.get(number)
        if ready_group is None or not ready_group.is_all_of(group):
            ready_group = self._prepared[number] = self._prepare_open(group, *under)
        return ready_group

    def _prepare_open(
        self, group: TrainerGroup, version: int, highest: Version | None
    ) -> ReadyGroup:
        arrived = tuple(group.arrived.values())
        received = {key: note for key, note in group.annotations.items() if key[0] in group.arrived}
        records = [a.record for a in arrived]
        notes = {key: note.record for key, note in received.items()}
        believed = BelievedVersions(0, self.terms).up_to(highest)
        prepared = prepare_group(group.admitted.group, records, notes, self.rule, version, believed)
        if group.released:
            counts = {**prepared.counts, "released": group.released}
            prepared = replace(prepared, counts=counts)
        used = tuple(note.used for note in received.values())
        return ReadyGroup(arrived, used, prepared, group.admitted.settings)

    def _write(
        self,
        progress: selection.UpdateProgress,
        chosen: Sequence[ReadyGroup],
        believed: Version | None,
    ) -> None:
        pending = [self._samples[trajectory] for trajectory in progress.pending]
        batches = selection.pack_micro_batches(pending, self.settings.micro_batch_tokens)
        takes: list[Take] = []
        read = self.intake.read_to()
        new_groups = {r.prepared.group: r for r in chosen}
        for index, batch in enumerate(batches):
            members = tuple(self._members[sample.trajectory] for sample in batch)
            # The first take with a sample of a new group names the whole group.
            firsts = [
                new_groups.pop(sample.group) for sample in batch if sample.group in new_groups
            ]
            takes.append(
                Take(
                    step=progress.step,
                    update=progress.update,
                    micro_batch=progress.micro_batches + index,
                    members=members,
                    groups=tuple(members_of(r) for r in firsts),
                    annotations=tuple(used for r in firsts for used in r.annotations),
                    read=read if firsts else (),
                    believed=believed if firsts else None,
                    settings=tuple(sorted({r.settings for r in firsts if r.settings})),
                )
            )
        # Durable together before any of them is trained.
        self.ledger.append(takes)
        for take in takes:
            trajectories = [member.trajectory for member in take.members]
            self._train(trajectories, progress, take.micro_batch)
