"""The trainer on a rank other than 0, called a follower. Ranks are processes that train one model
together; rank 0 alone holds the lease and the term, chooses the trajectories of each take and
appends all records. A follower receives no commands: it reads rank 0's takes in the ledger
(`FollowedLedger`), trains them in the same order (`TakeFollower` in a `FollowerLoop`), and so
enters the same collectives (operations that all ranks enter together). It appends no record. Of
versions and checkpoints it writes its part of the tensors; rank 0 completes them with the manifest
(docs/how-to/several-gpus.md, How it works).
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
"""Longest wait for a record before a follower asks whether rank 0 has ended (`Ranks.has_ended`)."""


class FollowedLedger:
    """Reads the ledger of rank 0's `term` while rank 0 appends to it. `takes` holds, by step and
    update, the takes of the term that were read and not trained yet. `has_ended` returns whether
    rank 0 has ended.

    Records of earlier terms after this term's `Opened` are void, as for every reader (invariant
    7), so a zombie's takes are not trained. The `Opened` of a higher term means that rank 0 has
    been replaced: reading it raises `Fenced`.
    """

    def __init__(self, bus: Bus, term: int, has_ended: Callable[[], bool]) -> None:
        self._bus, self._term, self._has_ended = bus, term, has_ended
        self.takes: dict[UpdateKey, list[Take]] = {}
        self.ended = threading.Event()
        """Set once rank 0 has ended and every record that it appended is read."""
        self._recorded = LedgerTail()
        self._is_opened = self._is_configured = False

    def open(self, position: Position, configuration_hash: str = "") -> LedgerTail:
        """Read from a checkpoint's `position` up to this term's `Configured`, for which this waits,
        and return these records; the hash is that of the checkpoint's configuration. Raises
        `Fenced` if a higher term has begun.

        All ranks load the same checkpoint, and each reads the ledger from the position in it.
        Takes before this term's `Opened` are of earlier terms and are trained again. Rank 0
        decides about them (which are superseded, which groups are closed), appends these decisions
        and then `Configured`. So once a follower has read `Configured` it knows the repeated takes,
        and every take after it is new.
        """
        self.reader = TopicReader(self._bus, "ledger", {0: position}, with_opened=True)
        recorded = LedgerTail(since=position, since_configuration=configuration_hash)
        self._recorded = recorded
        while not self._is_configured:
            self.read(IDLE_S)
        for place, takes in recorded.takes.items():
            recorded.takes[place] = [recorded.superseded.effective(take) for take in takes]
        return recorded

    def read(self, wait_s: float) -> None:
        """Read new records, and wait at most `wait_s` for them. Sets `ended` if none came and
        rank 0 has ended.

        While rank 0 waits for data, no rank is in a collective, so a follower may wait for takes
        without limit. Before rank 0 ends it trains every full round (one micro-batch per rank) of
        the takes that it appended, so followers that train the same takes stop at the same place.
        """
        records = self._poll(wait_s)
        for received in records:
            self._apply(received.record)
        if not records and wait_s and self._has_ended():
            self.ended.set()

    def _poll(self, wait_s: float) -> list[Received]:
        """Read new records. If the next one was truncated meanwhile, continue at the first kept
        one: no take is missed, because records are truncated only up to the position in a
        checkpoint, and this rank has trained the takes before it and helped to write it. Raises
        `PositionLost` if that happens before this term's `Configured` is read.
        """
        try:
            return self.reader.follow(wait_s)
        except PositionLost:
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
    """Trains first the takes that the ledger held when the term began, as every rank does
    (`TakeRepeater`), then those that rank 0 appends, as they arrive.
    """

    ledger: FollowedLedger
    report: Callable[[Sequence[TakeFailed]], None]
    """Hands failures of this rank to rank 0, which records them (`Ranks.report`)."""

    def read(self, wait_s: float = 0.0) -> None:
        """Read new records; waits for at most `IDLE_S`, or not at all if `wait_s` is 0."""
        self.ledger.read(IDLE_S if wait_s else 0.0)

    def take_ready(self, progress: UpdateProgress, step_metrics: StepMetrics, now_s: float) -> int:
        """Train the takes of this update that were read since the last call; returns their
        number.
        """
        takes = self.ledger.takes.pop((progress.step, progress.update), [])
        for take in takes:
            self.repeat(take, progress, step_metrics)
        return len(takes)

    def record_repetition(self, repetition: TakesRepeated) -> None:
        """Do nothing: rank 0 records it."""

    def record_failure(self, failed: ComputeFailed) -> None:
        """Let rank 0 record the failed takes: it alone appends to the ledger. This rank then ends
        and its connections close, so that all ranks end and restart together.
        """
        self.report(self.failures(failed))


@dataclass(slots=True, kw_only=True)
class FollowerLoop(StepLoop[TakeFollower]):
    """Runs the steps of a follower. The caller runs it until `ended` is set."""

    @property
    def ended(self) -> threading.Event:
        """Set once rank 0 has ended and every record that it appended is read."""
        return self.take_feeder.ledger.ended

    def metric_values(self) -> MetricValues:
        """Returns only the follower's step; rank 0 returns the metrics of the trainer."""
        return {"trainer_step": self.step}

    def checkpoint_state(self, step: int) -> Mapping[str, Any]:
        """Returns {}: only rank 0 writes the state beside the tensors into a checkpoint."""
        return {}


def build_follower(
    bus: Bus,
    store: ObjectStore,
    plan: TrainerPlan,
    initial: InitialModel,
    run: str,
    on_pause: Callable[[], object],
) -> FollowerLoop | None:
    """Wait until rank 0 holds its term, and return the loop that follows it from the checkpoint
    that all ranks load; None if rank 0 ended before. `turned` is called repeatedly during the wait,
    so that the caller can show that it lives. The function performs the steps of `build_trainer`,
    without those that belong to rank 0 alone.
    """
    ranks = initial.ranks
    assert ranks is not None, "one process has no rank to follow"
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
    """Raise `ConfigurationError` unless this process has rank 0's starting model and settings, by
    the hashes in rank 0's `start`.
    """
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
