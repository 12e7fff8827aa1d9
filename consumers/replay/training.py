"""Trains the planned steps of a replay without rollouts. Versions, ledger, metrics and checkpoints
go through the trainer's publisher to the replay's own log and store (`ReplayOutput`); a recorded
run is only read.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from rollstream.consumers.replay.recorded_steps import PlannedStep, ReplayCourse, replay_batches
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.sample import Sample, sample_of
from rollstream.consumers.trainer.learn.base import Learner
from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.consumers.trainer.ledger import Ledger, LedgerTail, hashes_state
from rollstream.consumers.trainer.publisher import StepPublisher, StepSnapshot
from rollstream.streams.bus import Bus
from rollstream.streams.records import (
    Configured,
    Position,
    StepDone,
    TakesRepeated,
    Trajectory,
)
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class ReplayOutput:
    """Where a replay writes, and under which term."""

    publisher: StepPublisher
    ledger: Ledger
    dtype: str
    """Type of published weights."""
    checkpoint_every: int
    """Steps between two checkpoints."""
    configured: Configured
    """The replay's settings for its ledger."""
    term: int
    recorded: LedgerTail
    """The ledger's records after the checkpoint from which an interrupted replay resumes; empty in
    a new one.
    """

    def record_plan(self, planned: PlannedStep) -> None:
        """Appends the step's takes and closed groups, except those that an interrupted replay has
        appended.
        """
        step, recorded = planned.step, self.recorded
        appended = {(t.update, t.micro_batch) for (s, _), ts in recorded.takes.items() if s == step
                 for t in ts}  # fmt: skip
        closed = {group.group for group in recorded.closed}
        self.ledger.append(
            [
                *(group for group in planned.closed if group.group not in closed),
                *(
                    take
                    for take in planned.takes
                    if (take.update, take.micro_batch) not in appended
                ),
            ]
        )

    def record_repetition(self, step: int, update: int, epoch: int, batches: int) -> None:
        """Appends that an update's micro-batches are trained once more, unless an interrupted
        replay has.
        """
        numbers = tuple(range(batches))
        if self.recorded.repeated.get((step, update, epoch)) != numbers:
            self.ledger.append([TakesRepeated(step, update, epoch, numbers)])

    def state(self, step: int, updates: int) -> TrainerState:
        """Returns the JSON part of a checkpoint: the ledger's position, without open groups and
        other topics.
        """
        position, settings_hash = self.ledger.position(), self.configured.configuration_hash
        return TrainerState(step, updates, position, {}, (), Counter(), settings_hash)


def ledger_position(state: Mapping[str, Any]) -> Position:
    """Returns the position in its ledger from which a replay resumes, from its checkpoint's JSON
    part.
    """
    return TrainerState.decode(state).ledger


@dataclass(slots=True)
class ReplayTrainer:
    """Trains planned steps and publishes each; `source` is the log that holds the trajectories."""

    source: Bus
    output: ReplayOutput
    monotonic: Callable[[], float]

    def train(
        self, learner: Learner, course: ReplayCourse, steps: Iterable[PlannedStep]
    ) -> Iterator[StepDone]:
        """Trains the steps in order, and yields each `StepDone` once it is handed to the publisher.
        The last step always gets a checkpoint.
        """
        for planned in steps:
            yield self._step(learner, course, planned)

    def _step(self, learner: Learner, course: ReplayCourse, planned: PlannedStep) -> StepDone:
        started, busy_s, step_metrics = self.monotonic(), learner.busy_s, StepMetrics()
        step, takes = planned.step, planned.takes
        step_metrics.add_recorded(planned.closed, step)
        # The phases of the trainer's loop: takes are recorded before they are trained.
        self.output.record_plan(planned)
        metrics: dict[str, float] = {}
        batches_by_update: list[list[list[Sample]]] = []
        for update in range(course.settings.updates_per_step):
            mine = [take for take in takes if take.update == update]
            batches_by_update.append([])
            for batch in replay_batches(self.source, mine, course, planned, step_metrics):
                learner.submit(batch)
                if course.settings.epochs > 1:
                    batches_by_update[-1].append(batch)
            self.output.publisher.await_lent()  # the update overwrites memory lent to a checkpoint
            metrics = learner.finish_update()
        for epoch in range(1, course.settings.epochs):
            for update, batches in enumerate(batches_by_update):
                self.output.record_repetition(step, update, epoch, len(batches))
                for batch in batches:
                    learner.submit(batch)
                self.output.publisher.await_lent()
                metrics = learner.finish_update()
        times = {"seconds": self.monotonic() - started, "busy_s": learner.busy_s - busy_s}
        everything = {**metrics, **step_metrics.metrics(), **times}
        is_hashed = hashes_state(learner.state_bytes, planned.done)
        done = StepDone(
            step=step,
            version=Version(step, self.output.term),
            state_hash=learner.state_hash() if is_hashed else "",
            takes=planned.trained,
            metrics={name: value for name, value in everything.items() if math.isfinite(value)},
            counts=dict(+step_metrics.counts),
            time_s=0.0,  # the publisher sets it
        )
        self._publish(learner, done, step_metrics, planned.is_last)
        return done

    def _publish(
        self, learner: Learner, done: StepDone, step_metrics: StepMetrics, is_last: bool
    ) -> None:
        out = self.output
        out.publisher.await_room()
        checkpoint = None
        if is_last or done.step % out.checkpoint_every == 0:
            state = out.state(done.step, learner.updates)
            checkpoint = (learner.state(out.publisher.state_buffers), state.encode())
        tensors = learner.snapshot(out.dtype, out.publisher.weight_buffers)
        is_lent = checkpoint is not None and learner.lends_state
        recorded_done = out.recorded.done.get(done.step)
        lags, outcomes = dict(step_metrics.lags), dict(step_metrics.outcomes)
        snapshot = StepSnapshot(done, tensors, checkpoint, recorded_done, lags, outcomes, is_lent)
        # A lent checkpoint is the learner's memory: no update may begin before it is written.
        out.publisher.submit(snapshot)


class BehaviourModel:
    """Fills in log-probabilities that the sampler did not record, by the starting model: the
    importance ratio is then 1 in the first step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._policy = policy_scorer(model.eval())

    def fill(self, record: Trajectory) -> Trajectory:
        """Returns the record with log-probabilities of its tokens at its temperature."""
        with torch.no_grad():
            # Alone, so that its bits do not depend on other records.
            scores = self._policy(token_rows([sample_of(record, 0.0)]))
        return replace(record, logprobs=scores.logprobs.numpy().astype(np.float32))
