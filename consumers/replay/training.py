"""Trains recorded steps again: no rollout, no waiting, nothing written into the run.

What comes of it (versions, ledger, metrics, checkpoints) goes to a store and a log of its own,
through the trainer's own publisher.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from consumers.replay.batches import Course, batches_of
from consumers.replay.recorded import RecordedSteps
from consumers.trainer.checkpoint import TrainerState
from consumers.trainer.figures import StepFigures
from consumers.trainer.learner import Learner
from consumers.trainer.ledger import Ledger
from consumers.trainer.publisher import Publisher, Snapshot
from streams.bus import Bus
from streams.records import Configured, StepDone, Version

log = logging.getLogger(__name__)

TERM = 1


@dataclass(frozen=True, slots=True)
class Output:
    """Where a replay writes."""

    publisher: Publisher
    ledger: Ledger
    dtype: str
    checkpoint_every: int
    configured: Configured


@dataclass(slots=True)
class Replay:
    """`source` is the run's whole log, `recorded` its ledger."""

    source: Bus
    recorded: RecordedSteps
    output: Output
    monotonic: Callable[[], float]

    def train(
        self, learner: Learner, course: Course, steps: Iterable[int], last: int
    ) -> Iterable[StepDone]:
        """Each step's outcome as it is done; the checkpoint after `last` is written in any case."""
        for step in steps:
            yield self._step(learner, course, step, step == last)

    def _step(self, learner: Learner, course: Course, step: int, is_last: bool) -> StepDone:
        started, busy_s, figures = self.monotonic(), learner.busy_s, StepFigures()
        closed, takes = self.recorded.closed.get(step, []), self.recorded.takes[step]
        figures.recall(closed, step)
        self.output.ledger.append([*closed, *takes])
        metrics: dict[str, float] = {}
        for update in range(course.settings.updates_per_step):
            mine = [take for take in takes if take.update == update]
            for batch in batches_of(self.source, mine, course, step - 1, figures):
                learner.submit(batch)
            metrics = learner.finish_update()
        times = {"seconds": self.monotonic() - started, "busy_s": learner.busy_s - busy_s}
        everything = {**metrics, **figures.metrics(), **times}
        done = StepDone(
            step=step,
            version=Version(step, TERM),
            state_hash=learner.state_hash(),
            takes=len(takes),
            metrics={name: value for name, value in everything.items() if math.isfinite(value)},
            counts=dict(+figures.counts),
            time_s=0.0,
        )
        self._hand_over(learner, done, figures, is_last)
        return done

    def _hand_over(
        self, learner: Learner, done: StepDone, figures: StepFigures, is_last: bool
    ) -> None:
        out = self.output
        out.publisher.await_room()
        checkpoint = None
        if is_last or done.step % out.checkpoint_every == 0:
            state = self._state(learner, done.step)
            checkpoint = (learner.state(out.publisher.states), state.encode())
        tensors = learner.snapshot(out.dtype, out.publisher.weights)
        lags, outcomes = dict(figures.lags), dict(figures.outcomes)
        out.publisher.submit(Snapshot(done, tensors, checkpoint, False, lags, outcomes))

    def _state(self, learner: Learner, step: int) -> TrainerState:
        out = self.output
        position, by_hash = out.ledger.position(), out.configured.configuration_hash
        return TrainerState(step, learner.updates, position, {}, (), Counter(), by_hash)
