"""The trainer's loop: each step is handed to the publisher while the next is trained; recorded
steps after the checkpoint are repeated through the same phases first.

With several ranks each runs this loop: phases follow from the ledger's takes and the settings
alone, so all enter the same collectives without commands from rank 0 (`sharded/follower.py`).

Reading list: after `producers/rollout/publisher.py`, before `consumers/trainer/data/groups.py`.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollstream.consumers.trainer.checkpoint import trainer_state
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.selection import UpdateProgress, groups_of_update
from rollstream.consumers.trainer.ledger import LedgerTail, hashes_state
from rollstream.consumers.trainer.publisher import StepPublisher, StepSnapshot
from rollstream.consumers.trainer.takes import TakeFeeder, TakeRepeater
from rollstream.metric_values import MetricValues
from rollstream.streams.records import StepDone
from rollstream.streams.values import Version

WAIT_S = 0.02  # wait for new records when no group can be taken

FeederT = TypeVar("FeederT", bound=TakeRepeater)


@dataclass(slots=True, kw_only=True)
class StepLoop(ABC, Generic[FeederT]):
    """One term of a trainer, or of a rank that follows it, after `step` finished steps. `recorded`
    are later records of earlier terms.
    """

    take_feeder: FeederT
    publisher: StepPublisher
    recorded: LedgerTail
    step: int
    term: int
    dtype: str
    checkpoint_every: int
    monotonic: Callable[[], float] = time.monotonic

    def run(self, stop: threading.Event) -> bool:
        """Trains until the last step or until `stop`; returns whether the run is complete. On
        return every finished step is published. Raises `ComputeFailed` if the learner could not
        compute some takes, recorded first if they may be the cause.
        """
        steps = self.take_feeder.settings.steps
        try:
            while self.step < steps and self._step(self.step + 1, stop):
                self.step += 1
        except ComputeFailed as failed:
            # A step that has a `StepDone` was computed before: its takes are not the cause.
            if self.step + 1 not in self.recorded.done:
                self.take_feeder.record_failure(failed)
            raise
        self.publisher.close()
        return self.step >= steps

    def _step(self, step: int, stop: threading.Event) -> bool:
        # The phases of docs/reference/invariants.md, A trainer's step. After False the next start
        # repeats the takes.
        started, step_metrics = self.monotonic(), StepMetrics()
        step_metrics.add_recorded(self.recorded.closed, step)
        metrics: dict[str, float] = {}
        settings, learner = self.take_feeder.settings, self.take_feeder.learner
        waited, busy_s = 0.0, learner.busy_s
        for update in range(settings.updates_per_step):
            progress = UpdateProgress(step, update, self.groups_needed(step, update))
            waited += self._feed(progress, step_metrics, stop)
            if not progress.is_complete():
                return False
            self._finish_update(metrics)
        takes = self.takes_trained()
        for epoch in range(1, settings.epochs):
            for update in range(settings.updates_per_step):
                if stop.is_set():
                    return False
                self.take_feeder.train_again(step, update, epoch, self.recorded)
                self._finish_update(metrics)
        seconds = self.monotonic() - started
        times = {"seconds": seconds, "wait_s": waited, "busy_s": learner.busy_s - busy_s}
        everything = {**metrics, **step_metrics.metrics(), **times}
        # A skipped update has no finite gradient norm, and the JSON header of a record cannot hold
        # NaN.
        finite = {name: value for name, value in everything.items() if math.isfinite(value)}
        self._hand_over(step, takes, step_metrics, finite)
        return True

    def _finish_update(self, metrics: dict[str, float]) -> None:
        skipped = metrics.get("updates_skipped", 0.0)
        self.publisher.await_lent()  # a checkpoint may be in writing from the learner's state
        metrics |= self.take_feeder.learner.finish_update()  # only the first reports the mismatch
        # Later updates replace a step's metrics; skipped ones add up.
        metrics["updates_skipped"] = skipped + metrics.get("updates_skipped", 0.0)

    def _feed(
        self, progress: UpdateProgress, step_metrics: StepMetrics, stop: threading.Event
    ) -> float:
        waited = 0.0
        # Recorded takes come first: a successor finishes the step on the same samples.
        self.take_feeder.repeat_recorded(self.recorded, progress, step_metrics)
        self.take_feeder.read()
        while not progress.is_complete() and not stop.is_set():
            # A failed publisher stops versions and with them admission: without this check the
            # loop would wait for data for ever.
            self.publisher.check()
            if not self.take_feeder.take_ready(progress, step_metrics, self.monotonic()):
                began = self.monotonic()
                self.take_feeder.read(WAIT_S)
                waited += self.monotonic() - began
        return waited

    def _hand_over(
        self, step: int, takes: int, step_metrics: StepMetrics, metrics: dict[str, float]
    ) -> None:
        learner = self.take_feeder.learner
        is_hashed = hashes_state(learner.state_bytes, self.repeated_done(step))
        done = StepDone(
            step=step,
            version=Version(step, self.term),
            state_hash=learner.state_hash() if is_hashed else "",
            takes=takes,
            metrics=metrics,
            counts=dict(step_metrics.counts),
            time_s=0.0,
        )
        self.publisher.await_room()
        checkpoint = None
        if step % self.checkpoint_every == 0 or self.is_last(step):
            checkpoint = (learner.state(self.publisher.state_buffers), self.checkpoint_state(step))
        snapshot = StepSnapshot(
            done,
            learner.snapshot(self.dtype, self.publisher.weight_buffers),
            checkpoint,
            # Its hashes are compared with those of the repetition.
            self.recorded.done.get(step),
            dict(step_metrics.lags),
            dict(step_metrics.outcomes),
            # The publisher reads the learner's memory; the next update waits (`await_lent`).
            is_lent=checkpoint is not None and learner.lends_state,
        )
        self.publisher.submit(snapshot)

    def groups_needed(self, step: int, update: int) -> int:
        """Returns the number of groups that the update trains or closes."""
        settings, done = self.take_feeder.settings, self.recorded.groups_done(step, update)
        if done is not None:
            return done
        return groups_of_update(update, settings.groups_per_step, settings.updates_per_step)

    def takes_trained(self) -> int:
        """Returns the number of takes that the present step has trained."""
        return self.take_feeder.learner.micro_batches

    def repeated_done(self, step: int) -> StepDone | None:
        """Returns the record of this step that its repetition is compared with, if there is one."""
        return self.recorded.done.get(step)

    def is_last(self, step: int) -> bool:
        """Whether the loop ends with this step, which then gets a checkpoint."""
        return step == self.take_feeder.settings.steps

    @abstractmethod
    def checkpoint_state(self, step: int) -> Mapping[str, Any]:
        """The JSON part of a checkpoint, now, at the end of `step`."""


@dataclass(slots=True, kw_only=True)
class Trainer(StepLoop[TakeFeeder]):
    """The loop of the holder of the trainer's lease and term (rank 0)."""

    configuration_hash: str

    def metric_values(self) -> MetricValues:
        """Returns the metric values of this term; totals count a step once its `StepDone` is in the
        ledger, and no repeated steps.
        """
        intake, now = self.take_feeder.intake, self.monotonic()
        groups = list(intake.open.values())
        return {
            "trainer_step": self.step,
            "trainer_steps_wanted": self.take_feeder.settings.steps,
            "trainer_groups_open": len(groups),
            "trainer_groups_complete": sum(group.is_finished() for group in groups),
            "trainer_oldest_group_age_seconds": max((now - g.since_s for g in groups), default=0.0),
            "trainer_completions_total": {
                kind: intake.counts[kind]
                for kind in ("late", "duplicate", "surplus", "malformed", "misplaced")
            },
            "trainer_version_published": self.publisher.version,
            "trainer_publish_waiting": self.publisher.waiting(),
            "trainer_checkpoint_age_seconds": self.publisher.checkpoint_age_s(),
            **self.publisher.totals.metric_values(),
        }

    def checkpoint_state(self, step: int) -> Mapping[str, Any]:
        feeder = self.take_feeder
        # Takes of later steps are before the ledger's end: a trainer that starts from this
        # checkpoint must read them again.
        ahead = self.recorded.goes_beyond(step)
        if ahead:
            position, configuration = self.recorded.since, self.recorded.since_configuration
        else:
            position, configuration = feeder.ledger.position(), self.configuration_hash
        state = trainer_state(
            step,
            feeder.learner.updates,
            position,
            feeder.intake,
            configuration,
            ahead,
            feeder.terms,
        )
        return state.encode()
