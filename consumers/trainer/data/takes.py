"""Gives the learner the data of each optimiser update, take by take: first the takes that the
ledger holds from an earlier term, then new ones. A take is in the ledger before it is trained.

`TakeRepeater` trains recorded takes: those of a dead trainer, or on other ranks those of rank 0
(`sharded/follower.py`). `TakeFeeder` also makes new ones of ready groups. Recorded and new takes go
through `prepare_group` and `UpdateProgress`, so a successor finishes a dead trainer's step on the
same samples, and a sample is used at most once (invariant 2).
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data import selection
from rollstream.consumers.trainer.data.groups import (
    GroupIntake,
    TrainerGroup,
    fetch_annotations,
    fetch_group,
)
from rollstream.consumers.trainer.data.poisoned_takes import (
    ComputeFailed,
    TakeKey,
    TakeNumber,
    error_text,
    number_of,
)
from rollstream.consumers.trainer.data.prepare import TrainingRule, prepare_group
from rollstream.consumers.trainer.data.ready_groups import (
    ReadyGroup,
    UntrainedGroups,
    candidate_of,
    closed_record,
    members_of,
)
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.base import Learner
from rollstream.consumers.trainer.learn.workers import is_out_of_memory
from rollstream.consumers.trainer.ledger import Ledger, LedgerTail
from rollstream.consumers.trainer.metrics import StepMetrics
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
    """Trains takes of the ledger on the records that they name, during one term. `rule` decides
    which samples of a group are trained; `settings` are the trainer's.
    """

    bus: Bus
    settings: TrainerSettings
    rule: TrainingRule
    learner: Learner
    terms: tuple[tuple[int, int], ...] = ()
    """Pairs (first version number, term) up to this term: which term published the versions from
    that number on (`BelievedVersions.terms`).
    """
    out_of_memory: Mapping[TakeNumber, int] = field(default_factory=dict[TakeNumber, int])
    """How often memory ran out on each recorded take in earlier terms (`TakeAttempts`)."""
    earlier_rules: Mapping[TakeNumber, TrainingRule] = field(
        default_factory=dict[TakeNumber, TrainingRule]
    )
    """The rules of recorded takes that are repeated under another one than `rule`."""
    _submitted: list[TakeKey] = field(default_factory=list[TakeKey])
    """The takes of the present step, in the order of their submission to the learner."""
    _kept: list[tuple[TakeKey, list[Sample]]] = field(
        default_factory=list[tuple[TakeKey, list[Sample]]]
    )
    """The samples of the present step's takes, if further epochs train them again."""
    _samples: dict[str, Sample] = field(default_factory=dict[str, Sample])
    """The pending samples, by trajectory: those of taken groups that no take has used yet."""
    _members: dict[str, Member] = field(default_factory=dict[str, Member])
    """The addresses and hashes of the pending samples' records."""

    @abstractmethod
    def read(self, wait_s: float = 0.0) -> None:
        """Read new records; returns once some came or `wait_s` has passed."""

    @abstractmethod
    def take_ready(
        self, progress: selection.UpdateProgress, step_metrics: StepMetrics, now_s: float
    ) -> int:
        """Train what was read for this update and is ready; returns 0 if nothing was."""

    def repeat_recorded(
        self, recorded: LedgerTail, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        """Train the takes of this update that the ledger held when the term began (`recorded`), and
        remove them from `recorded`.
        """
        for take in recorded.takes.pop((progress.step, progress.update), []):
            self.repeat(take, progress, step_metrics)

    def train_again(self, step: int, update: int, epoch: int, recorded: LedgerTail) -> None:
        """Train all takes of a finished update once more, as its `epoch` (1: the first repetition),
        and record that before, unless the ledger held it when the term began (`recorded`).
        """
        takes = [(key, samples) for key, samples in self._kept if key[:2] == (step, update)]
        numbers = tuple(number for key, _ in takes for number in key[2])
        if recorded.repeated.get((step, update, epoch)) != numbers:
            self.record_repetition(TakesRepeated(step, update, epoch, numbers))
        for key, samples in takes:
            self._submitted.append(key)
            self.learner.submit(samples)

    @abstractmethod
    def record_repetition(self, repetition: TakesRepeated) -> None:
        """Record that an update's takes are trained once more."""

    @abstractmethod
    def record_failure(self, failed: ComputeFailed) -> None:
        """Record the takes on which the learner failed, before this process ends."""

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
        """Train one recorded take."""
        self._repeat_groups(take, progress, step_metrics)
        self._repeat(take, progress)

    def _repeat_groups(
        self, take: Take, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        """Prepare the groups that a recorded take began, from the completions, annotations and
        believed versions that the take names, so that the samples are the same.
        """
        annotations = fetch_annotations(self.bus, take.annotations)
        believed = BelievedVersions(0, self.terms).up_to(take.believed)
        rule = self.earlier_rules.get(number_of(take), self.rule)
        for group in take.groups:
            arrived = fetch_group(self.bus, group.members)
            records = [a.record for a in arrived]
            prepared = prepare_group(group.group, records, annotations, rule, progress.version, believed)
            ready = ReadyGroup(tuple(arrived), take.annotations, prepared)
            if prepared.ending:  # the run continues under a configuration that was changed
                log.warning("group %d trains no sample now: %s", group.group, prepared.detail)
                progress.take_group(group.group, [])
            else:
                self._take_group(ready, progress, step_metrics)

    def _repeat(self, take: Take, progress: selection.UpdateProgress) -> None:
        """Train the samples that a recorded take names. Samples that the present rule no longer
        trains are dropped; a take without samples only counts.
        """
        trajectories = [member.trajectory for member in take.members]
        present = [trajectory for trajectory in trajectories if trajectory in progress.pending]
        if len(present) < len(trajectories):
            lost = len(trajectories) - len(present)
            log.warning("step %d: %d recorded samples dropped", take.step, lost)
        if present:
            self._train(present, progress, take.micro_batch)
        else:
            progress.skip_take()

    def _take_group(
        self, ready: ReadyGroup, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        """Add a group to the update; its samples are pending until takes use them."""
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
        """Submit the pending samples of one take to the learner."""
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
    """Feeds the trainer during one term: repeats recorded takes, then turns ready groups into new
    ones. `choose` selects among the ready groups, `intake` reads new records, and
    `annotation_watch` warns when groups wait for annotations.
    """

    choose: selection.GroupChoice
    intake: GroupIntake
    ledger: Ledger
    annotation_watch: selection.AnnotationWatch
    believed: Callable[[], Version | None]
    """Returns the highest believed version, which the publisher's thread advances."""
    _prepared: dict[int, ReadyGroup] = field(default_factory=dict[int, ReadyGroup])
    _prepared_for: tuple[int, Version | None] = (-1, None)
    """The version trained from and the highest believed version, for which `_prepared` holds the
    prepared groups: a ready group that is not taken is not prepared again at every poll.
    """
    _untrained: UntrainedGroups = field(default_factory=UntrainedGroups)
    _failing: threading.Lock = field(default_factory=threading.Lock)
    _has_failed: bool = False
    """Whether this term has recorded a failure; `_failing` guards it."""

    def read(self, wait_s: float = 0.0) -> None:
        self.intake.read(wait_s)

    def repeat_recorded(
        self, recorded: LedgerTail, progress: selection.UpdateProgress, step_metrics: StepMetrics
    ) -> None:
        """Train the takes of this update that the ledger held when the term began.

        In an unfinished step the marker `TakeRetried` is appended before each take is computed. If
        the trainer dies within the take, the marker is its last record, so the next trainer can
        count the death (`poisoned_takes.py`). A last marker, without a micro-batch, follows the
        takes: a death after it does not count.
        """
        is_unfinished = progress.step not in recorded.done
        takes = recorded.takes.pop((progress.step, progress.update), [])
        for take in takes:
            self._repeat_groups(take, progress, step_metrics)
            if is_unfinished and take.members:
                self.ledger.append([TakeRetried(take.step, take.update, take.micro_batch)])
            self._repeat(take, progress)
            if is_unfinished:
                self.learner.settle()
        if takes and is_unfinished:
            self.ledger.append([TakeRetried(progress.step, progress.update, None)])

    def record_repetition(self, repetition: TakesRepeated) -> None:
        self.ledger.append([repetition])

    def record_failure(self, failed: ComputeFailed) -> None:
        """Append a `TakeFailed` for the takes on which the learner failed, before this trainer
        ends.
        """
        self.append_failures(self.failures(failed))

    def append_failures(self, failures: Sequence[TakeFailed]) -> None:
        """Append the takes on which this rank or another one failed. Threads may call it; only the
        first call has an effect, because the term ends with it: if the memory of two ranks ends in
        one round, that is one failed attempt, not two.
        """
        with self._failing:
            if not self._has_failed:
                self.ledger.append(failures)
            self._has_failed = True

    def take_ready(
        self, progress: selection.UpdateProgress, step_metrics: StepMetrics, now_s: float
    ) -> int:
        """Take ready groups, and train their takes, if they complete the update or fill a
        micro-batch (`worth_taking`). Close groups that end untrained. Returns the number of groups
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
        """Returns the groups that may be taken, by number. Complete or overdue groups that
        contribute no sample are closed in the ledger.
        """
        ready: dict[int, ReadyGroup] = {}
        closed: list[GroupClosed] = []
        waiting = 0
        for number, group in list(self.intake.open.items()):
            if not group.is_complete() and not group.is_overdue(now_s):
                waiting += group.is_finished()
                continue
            prepared = self._prepare_once(number, group, (progress.version, believed))
            if not prepared.prepared.ending:
                ready[number] = prepared
                continue
            closed.append(closed_record(number, group, prepared.prepared, progress.step))
            records = [a.record for a in prepared.arrived]
            step_metrics.add_closed(closed[-1].reason, prepared.prepared.counts, records)
            self.intake.end(number)
        self.ledger.append(closed)
        self._untrained.check(closed, bool(ready), self.settings.groups_per_step)
        self.annotation_watch.check(waiting, self.intake.annotated_s, now_s)
        return ready

    def _prepare_once(
        self, number: int, group: TrainerGroup, under: tuple[int, Version | None]
    ) -> ReadyGroup:
        """Returns the prepared group. It is cached while its records, the version trained from and
        the highest believed version (`under` has both) stay the same: lag and masks depend on them.
        """
        if under != self._prepared_for:
            self._prepared, self._prepared_for = {}, under
        prepared = self._prepared.get(number)
        if prepared is None or not prepared.is_all_of(group):
            prepared = self._prepared[number] = self._prepare_open(group, *under)
        return prepared

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
        """Pack all pending samples into takes, append the takes to the ledger together, then train
        them. The first take with a sample of a `chosen` group also names the whole group.
        """
        pending = [self._samples[trajectory] for trajectory in progress.pending]
        batches = selection.pack_micro_batches(pending, self.settings.micro_batch_tokens)
        takes: list[Take] = []
        read = self.intake.read_to()
        new_groups = {r.prepared.group: r for r in chosen}
        for index, batch in enumerate(batches):
            members = tuple(self._members[sample.trajectory] for sample in batch)
            firsts = [new_groups.pop(sample.group) for sample in batch if sample.group in new_groups]
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
        self.ledger.append(takes)
        for take in takes:
            trajectories = [member.trajectory for member in take.members]
            self._train(trajectories, progress, take.micro_batch)
