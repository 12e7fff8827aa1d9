"""A trainer whose groups a test writes, over a log in memory, with a learner that only keeps time:
its decisions are in the ledger within milliseconds.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.build import InitialModel, Provenance, TrainerPlan, build_trainer
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.training_rule import UNBOUNDED, TrainingRule, training_rule
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.loop import Trainer
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import CheckpointSettings, WeightsSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.admissible import TrainingBounds
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Applied, Record, Trajectory, WeightsAnnounced
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Span, Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus

Kind = TypeVar("Kind", bound=Record)

SETTINGS: dict[str, Any] = {"steps": 2, "groups_per_step": 2, "samples_per_group": 2, "workers": 1}
START = Version(0, 1)
MODEL = PacedModel(seed=0, weights_bytes=4096, changed_share=0.1, step_s=0.0, token_s=0.0)


class Killed(BaseException):
    """Acts like `kill -9`: none of the process runs afterwards."""


@dataclass
class Breaking:
    """A learner that raises `error` when it gets one of these trajectories."""

    learner: Any
    names: frozenset[str]
    error: type[BaseException]

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        self.learner.submit(samples, shortages)
        if not self.names & {sample.trajectory for sample in samples}:
            return
        if self.error is not ComputeFailed:
            raise self.error
        cause = RuntimeError("CUDA error: device-side assert")
        raise ComputeFailed((self.learner.micro_batches - 1,), cause) from cause

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)


def completion(name: str, version: Version = START, **changed: Any) -> Trajectory:
    """`group.index`, four tokens, two of them generated; its reward is its index."""
    group, index = map(int, name.split("."))
    record = Trajectory(
        name, group, index, 1, "hand", "r", 1, np.array([3, 4, 5, 6], np.uint32),
        np.array([0, 0, 1, 1], np.uint8), np.array([-1, -2], np.float32),
        (Span(0, 2, version),), "stop", float(index), version, 0.0, 1.0,
    )  # fmt: skip
    return replace(record, **changed)


@dataclass
class HandFed:
    """`train` runs one term of the trainer."""

    folder: Path
    max_lag: int | None = None
    keep_version: bool = False
    bounds: TrainingBounds = UNBOUNDED
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    deadline_s: float = 600.0
    bus: Bus = field(default_factory=MemoryBus)
    terms: int = 0
    partitions: int = 1

    def __post_init__(self) -> None:
        self.bus.create(catalogue(self.partitions))
        self.store = open_store(f"file:{self.folder / 'store'}")
        self.admissions = FencedWriter(self.bus, "admissions", "dispatch", 1)
        self.admissions.open()

    def admit(self, group: int, samples: int = 2) -> None:
        names = tuple(f"{group}.{index}" for index in range(samples))
        record = Admitted(group, 0, names, self.deadline_s, Address(0, 0))
        self.admissions.append([(str(group), record)])

    def finish(self, *records: Trajectory) -> None:
        for record in records:
            publish(self.bus, "trajectories", str(record.group), record)

    def feed(self, *groups: int) -> None:
        """Whole, valid groups."""
        for group in groups:
            self.admit(group)
            self.finish(completion(f"{group}.0"), completion(f"{group}.1"))

    @property
    def rule(self) -> TrainingRule:
        settings = TrainerSettings(**(SETTINGS | self.settings))
        return training_rule(settings, self.max_lag, self.keep_version, self.bounds)

    def build(self) -> Trainer:
        self.terms += 1
        settings = TrainerSettings(**(SETTINGS | self.settings))
        return build_trainer(
            self.bus,
            self.store,
            TrainerPlan(settings, self.rule, WeightsSettings(), CheckpointSettings()),
            InitialModel(MODEL, {"config.json": b"{}"}),
            Provenance("hand", self.terms, "configuration", "revision"),
            MetricsFile(self.folder / f"trainer-{self.terms}.jsonl"),
        )

    def train(self, broken: frozenset[str] = frozenset(), error: type = ComputeFailed) -> bool:
        trainer = self.build()
        self._apply()
        trainer.take_feeder.learner = Breaking(trainer.take_feeder.learner, broken, error)  # pyright: ignore[reportAttributeAccessIssue]
        stop = threading.Event()
        alarm = threading.Timer(30.0, stop.set)  # short of groups it would wait forever
        alarm.start()
        try:
            return trainer.run(stop)
        finally:
            alarm.cancel()

    def offences(self) -> list[str]:
        """The findings of an audit."""
        return [offender.what for result in self.audit() for offender in result.offenders]

    def audit(self) -> list[InvariantResult]:
        """The results of an audit."""
        self._apply()
        policy = AuditPolicy(self.max_lag, self.keep_version, rule=self.rule)
        return list(Audit(self.bus, self.store, "hand", policy).check())

    def _apply(self) -> None:
        """The one rollout serves the announced version."""
        weights = TopicReader(self.bus, "weights", from_begin(self.bus, "weights"))
        for one in weights.read_to(self.bus.end("weights")):
            assert isinstance(one.record, WeightsAnnounced)
            version, hash_ = one.record.version, one.record.manifest_hash
            applied = Applied("r", 1, version, hash_, "hashes", 1, 0.0, 0.0)
            publish(self.bus, "applied", "r", applied)

    def ledger(self, kind: type[Kind]) -> list[Kind]:
        reader = TopicReader(self.bus, "ledger", from_begin(self.bus, "ledger"))
        found = [received.record for received in reader.read_to(self.bus.end("ledger"))]
        return [record for record in found if isinstance(record, kind)]
