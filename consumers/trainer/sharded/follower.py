"""The trainer on a rank other than 0: it trains rank 0's takes from the ledger in the same order,
and so enters the same collectives without commands.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.consumers.trainer.build import (
    InitialModel,
    TrainerPlan,
    load_first,
    publish_step_0,
    publishing_terms,
)
from rollstream.consumers.trainer.checkpoint import ledger_begin
from rollstream.consumers.trainer.data.earlier_rules import earlier_rules
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed, UpdateKey
from rollstream.consumers.trainer.data.selection import UpdateProgress
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.ledger import LedgerTail
from rollstream.consumers.trainer.loop import StepLoop
from rollstream.consumers.trainer.publisher import StepPublisher
from rollstream.consumers.trainer.retention import ArchiveBackedBus
from rollstream.consumers.trainer.sharded.ranks import Ranks, TermStart
from rollstream.consumers.trainer.takes import TakeRepeater
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import ConfigurationError, Fenced, PositionLost
from rollstream.metric_values import MetricValues
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import (
    Configured,
    Opened,
    Position,
    Record,
    Take,
    TakeFailed,
    TakesRepeated,
)
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)

IDLE_S = 0.2
"""Then a follower asks whether rank 0 has ended."""


class FollowedLedger:
    """Reads the ledger of rank 0's `term` while rank 0 appends to it. `takes`, by step and update,
    were read and are not trained yet.

    Records of earlier terms after this term's `Opened` are void (invariant 7). The `Opened` of a
    higher term, which has replaced rank 0, raises `Fenced`.
    """

    def __init__(self, bus: Bus, term: int, has_ended: Callable[[], bool]) -> None:
        self._bus, self._term, self._has_ended = bus, term, has_ended
        self.takes: dict[UpdateKey, list[Take]] = {}
        self.ended = threading.Event()
        """Rank 0 has ended and all its records are read."""
        self._recorded = LedgerTail()
        self._is_opened = self._is_configured = False

    def open(self, position: Position, configuration_hash: str = "") -> LedgerTail:
        """Reads from a checkpoint's `position` up to this term's `Configured`, for which it waits.
        Raises `Fenced` if a higher term has begun.
        """
        self.reader = TopicReader(self._bus, "ledger", {0: position}, with_opened=True)
        recorded = LedgerTail(since=position, since_configuration=configuration_hash)
        self._recorded = recorded
        # Rank 0 appends its decisions about earlier takes (superseded, groups closed), then
        # `Configured`: once that is read, the repeated takes are known, and every later take is
        # new.
        while not self._is_configured:
            self.read(IDLE_S)
        for place, takes in recorded.takes.items():
            recorded.takes[place] = [recorded.superseded.effective(take) for take in takes]
        return recorded

    def read(self, wait_s: float) -> None:
        """Waits at most `wait_s`. Sets `ended` if no record came and rank 0 has ended."""
        # While rank 0 waits for data no rank is in a collective. Before it ends it trains every
        # full round of its takes, so all ranks stop at the same place.
        records = self._poll(wait_s)
        for received in records:
            self._apply(received.record)
        if not records and wait_s and self._has_ended():
            self.ended.set()

    def _poll(self, wait_s: float) -> list[Received]:
        try:
            return self.reader.follow(wait_s)
        except PositionLost:
            if not self._is_configured:
                raise
            # No take is missed: records are truncated up to the position in a checkpoint, and this
            # rank has trained the takes before it and helped to write it.
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
    """Trains the takes that the ledger held when the term began, then those that rank 0 appends."""

    ledger: FollowedLedger
    report: Callable[[Sequence[TakeFailed]], None]

    def read(self, wait_s: float = 0.0) -> None:
        """Waits at most `IDLE_S`, or not at all if `wait_s` is 0."""
        self.ledger.read(IDLE_S if wait_s else 0.0)

    def take_ready(self, progress: UpdateProgress, step_metrics: StepMetrics, now_s: float) -> int:
        """Trains this update's takes that were read since the last call; returns their number."""
        takes = self.ledger.takes.pop((progress.step, progress.update), [])
        for take in takes:
            self.repeat(take, progress, step_metrics)
        return len(takes)

    def record_repetition(self, repetition: TakesRepeated) -> None:
        """Does nothing: rank 0 records it."""

    def record_failure(self, failed: ComputeFailed) -> None:
        """Rank 0 alone appends it to the ledger."""
        self.report(self.failures(failed))


@dataclass(slots=True, kw_only=True)
class FollowerLoop(StepLoop[TakeFollower]):
    """A loop to be run until the ledger has `ended`."""

    def metric_values(self) -> MetricValues:
        """The step alone; rank 0 has the trainer's metrics."""
        return {"trainer_step": self.step}

    def checkpoint_state(self, step: int) -> Mapping[str, Any]:
        """Returns {}: rank 0 writes the state beside the tensors."""
        return {}


def build_follower(
    bus: Bus,
    store: ObjectStore,
    plan: TrainerPlan,
    initial: InitialModel,
    run: str,
    on_pause: Callable[[], object],
) -> FollowerLoop | None:
    """Waits until rank 0 holds its term, and follows it from the checkpoint that all ranks load;
    None if rank 0 ended before. `on_pause` is called during the wait. The steps are those of
    `build_trainer` that are not rank 0's alone.
    """
    ranks = initial.ranks
    assert isinstance(ranks, Ranks), "one process has no rank to follow"
    start = ranks.await_start(on_pause)
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
    recorded = ledger.open(*ledger_begin(state))
    take_follower = TakeFollower(
        bus=log_bus,
        settings=plan.trainer,
        rule=plan.rule,
        learner=learner,
        earlier_rules=earlier_rules(store, plan.rule, recorded.taken_under),
        terms=publishing_terms(() if state is None else state.terms, recorded, versions),
        out_of_memory=recorded.attempts.out_of_memory,
        ledger=ledger,
        report=ranks.report,
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
    """Raises `ConfigurationError` unless this process has rank 0's starting model and settings."""
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
