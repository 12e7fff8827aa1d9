"""Trains the planned steps of a replay without rollouts, through the phases of the trainer's loop.
Versions, ledger, metrics and checkpoints go to the replay's own folder; the log that holds the
trajectories is only read.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.consumers.trainer.data.groups import ReceivedCompletion
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed, number_of
from rollstream.consumers.trainer.data.ready_groups import ReadyGroup
from rollstream.consumers.trainer.data.selection import UpdateProgress, pack_micro_batches
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.consumers.trainer.learn.base import Learner
from rollstream.consumers.trainer.ledger import Ledger, LedgerTail
from rollstream.consumers.trainer.loop import StepLoop
from rollstream.consumers.trainer.past_versions import NeededVersions
from rollstream.consumers.trainer.publisher import CheckpointRetention, StepPublisher
from rollstream.consumers.trainer.retention import HeldVersions
from rollstream.consumers.trainer.takes import TakeRepeater
from rollstream.consumers.trainer.totals import missing_lines
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.keep.replay.recorded_steps import PlannedStep
from rollstream.revision import code_revision
from rollstream.run.config.config import fingerprint
from rollstream.run.config.run_folder import (
    RunFolder,
    open_run_log_for_writing,
    store_for_writing,
    store_url,
)
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.train import version_files
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.storage.stores.connect import open_store
from rollstream.storage.terms import REPLAYS, next_term
from rollstream.storage.weights.checkpoints import newest_checkpoint, write_checkpoint
from rollstream.streams.bus import Bus
from rollstream.streams.records import Configured, Position, StepDone, TakesRepeated, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter

NEVER = threading.Event()


@dataclass(frozen=True, slots=True)
class ReplayCourse:
    """Settings and rule under which steps are trained; `keep(trajectory, step)` returns whether
    this step may use the trajectory.
    """

    settings: TrainerSettings
    rule: TrainingRule
    keep: Callable[[Trajectory, int], bool] = lambda record, step: True


@dataclass(slots=True, kw_only=True)
class PlannedTakes(TakeRepeater):
    """Trains the takes of planned steps, less the samples that rule or filter leave out."""

    keep: Callable[[Trajectory, int], bool]
    ledger: Ledger

    def read(self, wait_s: float = 0.0) -> None:
        """Does nothing: a planned step names all its data."""

    def take_ready(self, progress: UpdateProgress, step_metrics: StepMetrics, now_s: float) -> int:
        """Trains the samples that only another rule trains, as under a larger `max_lag`."""
        pending = [self._samples[trajectory] for trajectory in progress.pending]
        batches = pack_micro_batches(pending, self.settings.micro_batch_tokens)
        for batch in batches:
            names = [sample.trajectory for sample in batch]
            self._train(names, progress, progress.micro_batches)
        return len(batches)

    def selected(
        self,
        arrived: list[ReceivedCompletion],
        progress: UpdateProgress,
        step_metrics: StepMetrics,
    ) -> list[ReceivedCompletion]:
        """Returns the completions that meet the filter; counts the others."""
        kept = [completion for completion in arrived if self.keep(completion.record, progress.step)]
        if len(kept) < len(arrived):
            step_metrics.counts["filtered_out"] += len(arrived) - len(kept)
        return kept

    def leave_out(self, ready: ReadyGroup, step_metrics: StepMetrics) -> None:
        """Counts the group by its ending; without any completion left it is filtered."""
        records = [completion.record for completion in ready.arrived]
        if records:
            step_metrics.add_closed(ready.prepared.ending, ready.prepared.counts, records)
        else:
            step_metrics.add_closed("filtered", {})

    def drop_samples(self, step: int, dropped: int) -> None:
        """Does nothing: `selected` and the rule have counted them."""

    def record_repetition(self, repetition: TakesRepeated) -> None:
        self.ledger.append([repetition])

    def record_failure(self, failed: ComputeFailed) -> None:
        """Does nothing: the command fails, and the same command tries again."""


@dataclass(slots=True, kw_only=True)
class ReplayLoop(StepLoop[PlannedTakes]):
    """Trains planned steps and publishes each in the replay's own folder. `left` are the ledger's
    records after the checkpoint from which an interrupted replay resumes, which are not appended
    again; empty in a new one.
    """

    left: LedgerTail
    configuration_hash: str
    planned: PlannedStep = field(init=False)

    def train(self, steps: Iterable[PlannedStep]) -> Iterator[int]:
        """Trains the steps in order, and yields the number of each once it is handed to the
        publisher. The last step always gets a checkpoint.
        """
        for planned in steps:
            self.planned, self.step = planned, planned.step
            self.recorded = LedgerTail(done=self.left.done, repeated=self.left.repeated)
            for record in (*planned.closed, *planned.takes):
                self.recorded.apply(record)
            self._record_plan()
            self._step(planned.step, NEVER)
            yield planned.step

    def _record_plan(self) -> None:
        appended = {number_of(take) for takes in self.left.takes.values() for take in takes}
        closed = {group.group for group in self.left.closed}
        # Takes are recorded before they are trained, as in the trainer.
        self.take_feeder.ledger.append(
            [
                *(group for group in self.planned.closed if group.group not in closed),
                *(take for take in self.planned.takes if number_of(take) not in appended),
            ]
        )

    def change(self, learner: Learner, course: ReplayCourse) -> None:
        """Trains the steps that follow by another learner and course."""
        self.take_feeder = replace(
            self.take_feeder,
            settings=course.settings,
            rule=course.rule,
            learner=learner,
            keep=course.keep,
        )

    def groups_needed(self, step: int, update: int) -> int:
        return sum(len(take.groups) for take in self.planned.takes if take.update == update)

    def takes_trained(self) -> int:
        return self.planned.trained

    def repeated_done(self, step: int) -> StepDone | None:
        return self.planned.done

    def is_last(self, step: int) -> bool:
        return self.planned.is_last

    def checkpoint_state(self, step: int) -> Mapping[str, Any]:
        """Returns the ledger's position, without open groups and other topics."""
        updates, position = self.take_feeder.learner.updates, self.take_feeder.ledger.position()
        state = TrainerState(step, updates, position, {}, (), Counter(), self.configuration_hash)
        return state.encode()


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """The trained step and the tensors of the learner's state. `ledger` is the position in the
    folder's own ledger behind that step, None without a checkpoint there.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    ledger: Position | None


def newest_replay_checkpoint(folder: RunFolder, c: Configuration) -> ReplayProgress | None:
    """Returns the progress at the newest checkpoint in a replay's folder; None without one."""
    checkpoint = newest_checkpoint(open_store(store_url(c, folder.path), c.sync)).checkpoint
    if checkpoint is None:
        return None
    position = TrainerState.decode(checkpoint.state).ledger
    return ReplayProgress(checkpoint.id.step, checkpoint.tensors, position)


@contextmanager
def open_replay_loop(
    folder: RunFolder,
    c: Configuration,
    progress: ReplayProgress,
    source: Bus,
    learner: Learner,
    course: ReplayCourse,
    terms: tuple[tuple[int, int], ...] = (),
) -> Generator[ReplayLoop]:
    """Opens the loop that trains trajectories of `source` and writes to `folder`; everything is
    written when the block ends. `learner` must have the state of `progress`; `terms` are those of
    the versions that emitted the trajectories (`BelievedVersions.terms`).

    1. Take a new term, and fence earlier processes of this replay from publishing versions.
    2. Fence them from the ledger, and read their records after the newest checkpoint, which are not
       appended again.
    3. Publish the version to start with, and write its checkpoint if the folder has none.
    """
    with closing(open_run_log_for_writing(c, folder.path)) as bus:
        bus.create(catalogue())
        store = store_for_writing(c, folder.path)
        read_or_create_identity(store, c.run)  # by it `rm` knows the replay's files
        term = next_term(store, REPLAYS, REPLAYS)
        writer = FencedWriter(bus, "weights", "trainer", term)
        files = version_files(c, folder.path)
        needed = NeededVersions(store, c.trainer, c.dispatch.max_lag)
        versions = VersionWriter(
            store, writer, c.run, term, c.weights, files, HeldVersions(bus), needed
        )
        versions.open()  # 1
        ledger = Ledger(bus, term)
        left = ledger.open(progress.ledger or Position())  # 2
        configured = Configured(fingerprint(c), code_revision(), progress.step)
        ledger.append([configured])
        versions.publish(progress.step, learner.snapshot(c.weights.dtype))  # 3
        with MetricsFile(folder.metrics / "trainer.jsonl") as metrics:
            written = read_metrics(folder.metrics / "trainer.jsonl")
            for line in missing_lines(left.done, written):
                metrics.append(line)
            loop = ReplayLoop(
                take_feeder=PlannedTakes(
                    bus=source,
                    settings=course.settings,
                    rule=course.rule,
                    learner=learner,
                    terms=terms,
                    keep=course.keep,
                    ledger=ledger,
                ),
                publisher=StepPublisher(
                    store, versions, ledger, metrics, CheckpointRetention(c.checkpoints.keep)
                ),
                recorded=left,
                step=progress.step,
                term=term,
                dtype=c.weights.dtype,
                checkpoint_every=c.checkpoints.every,
                left=left,
                configuration_hash=configured.configuration_hash,
            )
            if progress.ledger is None:  # 3
                state = loop.checkpoint_state(progress.step)
                write_checkpoint(store, progress.step, term, learner.state(), state)
            yield loop
            loop.publisher.close()
