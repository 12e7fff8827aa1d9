"""Runs the trainer on a rank other than 0: it trains exactly what rank 0 trains, because it follows
rank 0's records in the ledger; rank 0 sends it no commands.

Every rank opens the run's log and store itself, reads the `Take`s in their order, fetches the
trajectories that they name, prepares the same micro-batches with the same functions, and runs the
same loop (`loop.py`), learner and publisher. Rank 0 alone holds the lease and the term: it chooses
the trajectories of each take, and appends takes, `StepDone`, manifests and announcements. A
follower appends no record and completes no version.

1. **Which takes count.** `TermStart` names rank 0's term. The ledger's reader passes records
   through the fence (invariant 7), so a take that a zombie appends behind this term's `Opened` is
   void. A higher term's `Opened` means that rank 0 has been replaced: the follower ends (`Fenced`).
2. **Where reading begins.** All ranks load the same checkpoint, and each reads the ledger from the
   position in it. Records before this term's `Opened` are of earlier terms: steps to repeat. Rank 0
   appends `Configured` behind its own decisions about these (superseded takes, closed groups), so
   a follower knows the steps to repeat once it reads `Configured`; every take behind it is new.
3. **Failures.** A rank that fails or runs out of memory ends; its connections close, and all ranks
   end and restart together. Rank 0 alone records a failed take.
4. **Waiting.** While rank 0 waits for data, no rank is in a collective: a follower waits for the
   ledger, however long, and asks the ranks' store whether rank 0 has ended. A stopped rank 0 has
   trained every round of the takes that it appended, so the followers stop at the same place.
5. **Truncation.** Records below a kept checkpoint's position are of steps whose checkpoint this
   rank has helped to write: it has read their takes, and skips the truncated records.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.consumers.trainer.build import (
    InitialModel,
    TrainerPlan,
    load_first,
    publish_step_0,
    publishing_terms,
)
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed, UpdateKey
from rollstream.consumers.trainer.data.retention import ArchiveBackedBus
from rollstream.consumers.trainer.data.selection import UpdateProgress
from rollstream.consumers.trainer.data.takes import TakeRepeater
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.ledger import LedgerTail
from rollstream.consumers.trainer.loop import StepLoop
from rollstream.consumers.trainer.metrics import StepMetrics
from rollstream.consumers.trainer.publisher import StepPublisher
from rollstream.consumers.trainer.sharded.ranks import TermStart
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import ConfigurationError, Fenced, PositionLost
from rollstream.metric_values import MetricValues
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import Configured, Opened, Position, Record, Take
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)

IDLE_S = 0.2
"""Longest wait for a record before a follower asks the ranks' store whether rank 0 has ended."""


class FollowedLedger:
    """Reads the ledger of one term while its trainer appends to it. `takes` holds, by step and
    update, the takes of the term that are read and not trained yet. `has_ended` returns whether
    rank 0 has ended.
    """

    def __init__(self, bus: Bus, term: int, has_ended: Callable[[], bool]) -> None:
        self._bus, self._term, self._has_ended = bus, term, has_ended
        self.takes: dict[UpdateKey, list[Take]] = {}
        self.ended = threading.Event()
        """Set once the term's trainer has ended and every record of it is read."""
        self._recorded = LedgerTail()
        self._is_opened = self._is_configured = False

    def open(self, position: Position) -> LedgerTail:
        """Wait for this term's `Configured`, and return the records between a checkpoint's
        `position` and it. Raises `Fenced` if a higher term has begun.
        """
        self.reader = TopicReader(self._bus, "ledger", {0: position}, with_opened=True)
        self._recorded = recorded = LedgerTail(since=position)
        while not self._is_configured:
            self.read(IDLE_S)
        for place, takes in recorded.takes.items():
            recorded.takes[place] = [recorded.superseded.effective(take) for take in takes]
        return recorded

    def read(self, wait_s: float) -> None:
        """Read new records, and wait at most `wait_s` for them. Sets `ended` if none came and rank
        0 has ended.
        """
        found = self._poll(wait_s)
        for received in found:
            self._apply(received.record)
        if not found and wait_s and self._has_ended():
            self.ended.set()

    def _poll(self, wait_s: float) -> list[Received]:
        try:
            return self.reader.follow(wait_s)
        except PositionLost:  # the records were truncated meanwhile: point 5 of the module
            if not self._is_configured:
                raise
            self.reader.positions = from_begin(self._bus, "ledger")
            return []

    def _apply(self, record: Record) -> None:
        match record:
            case Opened(term=term) if term > self._term:
                raise Fenced(f"the trainer of term {self._term} was replaced by that of {term}")
            case Opened(term=term):
                self._is_opened = term == self._term
            case Take() if self._is_configured:
                self.takes.setdefault((record.step, record.update), []).append(record)
            case _ if not self._is_configured:
                self._recorded.apply(record)
                self._is_configured = self._is_opened and isinstance(record, Configured)
            case _:
                pass


@dataclass(slots=True, kw_only=True)
class TakeFollower(TakeRepeater):
    """Trains the takes of the followed term as they arrive."""

    ledger: FollowedLedger

    def read(self, wait_s: float = 0.0) -> None:
        self.ledger.read(IDLE_S if wait_s else 0.0)

    def take_ready(self, progress: UpdateProgress, step_metrics: StepMetrics, now_s: float) -> int:
        """Train the takes of this update that are read so far, and return their number."""
        takes = self.ledger.takes.pop((progress.step, progress.update), [])
        for take in takes:
            self.repeat(take, progress, step_metrics)
        return len(takes)

    def record_failure(self, failed: ComputeFailed) -> None:
        """Log the failure; only rank 0 records failed takes in the ledger."""
        log.error("%s; all ranks end and restart together", failed)


@dataclass(slots=True, kw_only=True)
class FollowerLoop(StepLoop[TakeFollower]):
    """Runs the steps of a follower; the caller runs it until `ended` is set."""

    @property
    def ended(self) -> threading.Event:
        """Set once rank 0 has ended and every record that it appended is read."""
        return self.take_feeder.ledger.ended

    def metric_values(self) -> MetricValues:
        """Return the follower's step alone; rank 0 returns the metrics of the trainer."""
        return {"trainer_step": self.step}

    def checkpoint_state(self, step: int) -> Mapping[str, Any]:
        """Return {}: rank 0 alone writes this state into a checkpoint."""
        return {}


def build_follower(
    bus: Bus,
    store: ObjectStore,
    plan: TrainerPlan,
    initial: InitialModel,
    run: str,
    turned: Callable[[], object],
) -> FollowerLoop | None:
    """Wait until rank 0 holds its term, and return the loop that follows it from its newest
    checkpoint; None if rank 0 ended before. `turned` is called repeatedly during that wait. The
    function takes the steps of `build_trainer`, without those that belong to rank 0 alone.
    """
    ranks = initial.ranks
    assert ranks is not None, "one process has no rank to follow"
    start = ranks.await_start(turned)
    if start is None:
        return None
    check_start(start, plan, initial, ranks.rank)
    writer = FencedWriter(bus, "weights", "trainer", start.term)
    versions = VersionWriter(
        store, writer, run, start.term, plan.weights, initial.model_files, tuple, leads=False
    )
    versions.open()
    learner = open_learner(initial.model, plan.trainer)
    state = load_first(store, learner, start.checkpoints, ranks)
    if state is None:
        publish_step_0(store, versions, learner, plan.weights.dtype, None)
    log_bus = ArchiveBackedBus(bus, store, run)
    ledger = FollowedLedger(log_bus, start.term, ranks.has_ended)
    recorded = ledger.open(Position() if state is None else state.ledger)
    take_follower = TakeFollower(
        bus=log_bus,
        settings=plan.trainer,
        rule=plan.rule,
        learner=learner,
        terms=publishing_terms(() if state is None else state.terms, recorded, versions),
        ledger=ledger,
    )
    return FollowerLoop(
        take_feeder=take_follower,
        publisher=StepPublisher(store, versions, None, None, None),
        recorded=recorded,
        step=0 if state is None else state.step,
        term=start.term,
        dtype=plan.weights.dtype,
        checkpoint_every=plan.checkpoints.every,
    )


def check_start(start: TermStart, plan: TrainerPlan, initial: InitialModel, rank: int) -> None:
    """Raise `ConfigurationError` unless this process begins from rank 0's model and settings."""
    if start.model != initial.model_hash:
        raise ConfigurationError(
            f"rank {rank}: the model that this machine starts from is not rank 0's: give all "
            "machines the same model folder (model.path) or a shared run folder"
        )
    if start.settings != plan.hash_with(initial.model_files):
        raise ConfigurationError(
            f"rank {rank}: the settings or the tokenizer files of this machine are not rank "
            "0's: give all machines the same configuration or a shared run folder"
        )
