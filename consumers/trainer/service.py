"""The trainer's loop: one step after the other, each a version handed to the publisher.

Phases of a step (DESIGN.md, Trainer): feed each update with takes, update, compare with what the
ledger says if the step is a repeated one, snapshot, hand over. A restarted trainer goes through the
same phases (`resume.py`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from consumers.trainer.checkpoint import trainer_state
from consumers.trainer.figures import StepFigures
from consumers.trainer.learning import ComputeFailed
from consumers.trainer.ledger import Recorded
from consumers.trainer.progress import Progress, groups_of_update
from consumers.trainer.publisher import Publisher, Snapshot
from consumers.trainer.takes import Takes
from streams.figures import Figures
from streams.reader import TopicReader
from streams.records import StepDone, Version

log = logging.getLogger(__name__)

WAIT_S = 0.02


@dataclass(slots=True)
class Trainer:
    """One term of the trainer after `step` finished steps; `recorded` is what its predecessors did
    beyond them.
    """

    takes: Takes
    publisher: Publisher
    recorded: Recorded
    step: int
    term: int
    dtype: str
    checkpoint_every: int
    configuration_hash: str
    monotonic: Callable[[], float] = time.monotonic

    def run(self, stop: threading.Event) -> bool:
        """Train until the last step or `stop`; True when the run is complete. Everything trained is
        published.
        """
        steps = self.takes.settings.steps
        try:
            while self.step < steps and self._step(self.step + 1, stop):
                self.step += 1
        except ComputeFailed as failed:
            if self.step + 1 not in self.recorded.done:  # else it was computed, elsewhere
                self.takes.record_failure(failed)
            raise
        self.publisher.close()
        return self.step >= steps

    def _step(self, step: int, stop: threading.Event) -> bool:
        """One step; False when it was stopped before its end (its takes are repeated then)."""
        started, figures = self.monotonic(), StepFigures()
        figures.recall(self.recorded.closed, step)
        metrics: dict[str, float] = {}
        settings, learner = self.takes.settings, self.takes.learner
        waited, busy_s = 0.0, learner.busy_s
        for update in range(settings.updates_per_step):
            needed = groups_of_update(update, settings.groups_per_step, settings.updates_per_step)
            progress = Progress(step, update, needed)
            waited += self._feed(progress, figures, stop)
            if not progress.is_complete():
                return False
            skipped = metrics.get("updates_skipped", 0.0)
            metrics |= learner.finish_update()  # the mismatch is of the first one
            metrics["updates_skipped"] = skipped + metrics.get("updates_skipped", 0.0)
        seconds = self.monotonic() - started
        times = {"seconds": seconds, "wait_s": waited, "busy_s": learner.busy_s - busy_s}
        everything = {**metrics, **figures.metrics(), **times}
        # A skipped update (`updates_skipped`) has no gradient norm, and a record's header holds no
        # NaN.
        finite = {name: value for name, value in everything.items() if math.isfinite(value)}
        self._hand_over(step, figures, finite)
        return True

    def _feed(self, progress: Progress, figures: StepFigures, stop: threading.Event) -> float:
        """Recorded takes, then live ones, until the update is complete; returns seconds spent
        waiting for data.
        """
        waited = 0.0
        self.takes.repeat_all(self.recorded, progress, figures)
        self.takes.intake.read()
        while not progress.is_complete() and not stop.is_set():
            # Its failure stops versions, so admission: without a look this would wait for ever.
            self.publisher.check()
            if not self.takes.live(progress, figures, self.monotonic()):
                began = self.monotonic()
                self.takes.intake.read(WAIT_S)
                waited += self.monotonic() - began
        return waited

    def _hand_over(self, step: int, figures: StepFigures, metrics: dict[str, float]) -> None:
        learner = self.takes.learner
        state_hash = learner.state_hash()
        known = self.recorded.done.get(step)
        if known is not None and known.state_hash != state_hash:
            log.warning(
                "step %d differs from the ledger's (%s, recorded %s): the run goes on as a fork",
                step,
                state_hash,
                known.state_hash,
            )
        done = StepDone(
            step=step,
            version=Version(step, self.term),
            state_hash=state_hash,
            takes=learner.micro_batches,
            metrics=metrics,
            counts=dict(figures.counts),
            time_s=0.0,
        )
        self.publisher.await_room()
        is_known = known is not None and known.state_hash == state_hash
        checkpoint = None
        if step % self.checkpoint_every == 0 or step == self.takes.settings.steps:
            checkpoint = (learner.state(self.publisher.states), self._state(step))
        snapshot = Snapshot(
            done,
            learner.snapshot(self.dtype, self.publisher.weights),
            checkpoint,
            is_known,
            dict(figures.lags),
            dict(figures.outcomes),
        )
        self.publisher.submit(snapshot)

    def figures(self) -> Figures:
        """Of this term; steps and what they trained count once their `StepDone` is in the ledger,
        repeated ones do not.
        """
        intake, now = self.takes.intake, self.monotonic()
        groups = list(intake.open.values())
        return {
            "trainer_step": self.step,
            "trainer_steps_wanted": self.takes.settings.steps,
            "trainer_groups_open": len(groups),
            "trainer_groups_complete": sum(group.is_finished() for group in groups),
            "trainer_oldest_group_age_seconds": max((now - g.since_s for g in groups), default=0.0),
            "trainer_completions_total": {
                kind: intake.counts[kind]
                for kind in ("late", "duplicate", "malformed", "misplaced")
            },
            "trainer_version_published": self.publisher.version,
            "trainer_publish_waiting": self.publisher.waiting(),
            **self.publisher.totals.figures(),
        }

    def readers(self) -> list[TopicReader]:
        return self.takes.intake.readers()

    def _state(self, step: int) -> dict[str, object]:
        takes = self.takes
        # Takes of later steps lie before the end: who starts from here must find them again.
        ahead = self.recorded.goes_beyond(step)
        position = self.recorded.since if ahead else takes.ledger.position()
        state = trainer_state(
            step,
            takes.learner.updates,
            position,
            takes.intake,
            self.configuration_hash,
            ahead,
            takes.terms,
        )
        return state.encode()
