"""Where a replay goes on and what it writes: versions, checkpoints, ledger and metrics of its own
folder, under a term of its own.

1. The store's and the topics' fences.  2. What an earlier process left in the ledger behind the
newest checkpoint.  3. The version and the checkpoint to begin with.  A process killed anywhere is
gone on from the newest checkpoint, and what the ledger has already is not written again.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rollstream.consumers.replay.recorded_steps import RecordedSteps, read_recorded
from rollstream.consumers.replay.training import ReplayOutput, ledger_position
from rollstream.consumers.trainer.learn.base import Learning
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.data.retention import HeldVersions
from rollstream.consumers.trainer.publisher import StepPublisher, CheckpointRetention
from rollstream.consumers.trainer.step_lines import missing_lines
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.config.settings import Configuration
from rollstream.config.config import fingerprint
from rollstream.config.run_folder import RunFolder, model_folder, open_run_log_for_writing, store_for_writing, store_url
from rollstream.revision import code_revision
from rollstream.roles.train_role import config_and_tokenizer_files
from rollstream.storage.checkpoints import newest_checkpoint, write_checkpoint
from rollstream.storage.stores.connect import open_store
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import next_term
from rollstream.streams.records import Configured, Position
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """A step that is done, with its state; `ledger` is where the folder's ledger goes on, None: the
    folder has no checkpoint yet.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    ledger: Position | None


def newest_replay_checkpoint(folder: RunFolder, c: Configuration) -> ReplayProgress | None:
    """The newest checkpoint of a replay that was stopped; None if it had none yet."""
    found = newest_checkpoint(_replay_store(folder, c)).checkpoint
    if found is None:
        return None
    return ReplayProgress(found.id.step, found.tensors, ledger_position(found.state))


def read_own_ledger(folder: RunFolder, c: Configuration) -> RecordedSteps:
    """What the folder's ledger says; empty where it has none yet."""
    bus = open_run_log_for_writing(c, folder.path)
    try:
        bus.create(catalogue())
        return read_recorded(bus)
    finally:
        bus.close()


@contextmanager
def open_replay_output(
    folder: RunFolder, c: Configuration, behind: ReplayProgress, learner: Learning
) -> Generator[ReplayOutput]:
    """Everything is in the folder when this ends; `learner` is at the step that is `behind`."""
    bus = open_run_log_for_writing(c, folder.path)
    try:
        bus.create(catalogue())
        store = store_for_writing(c, folder.path)
        term = next_term(store, "replay", "replay")
        writer = FencedWriter(bus, "weights", "trainer", term)
        files = config_and_tokenizer_files(model_folder(c, folder.path))
        versions = VersionWriter(store, writer, c.run, term, c.weights, files, HeldVersions(bus))
        versions.open()  # 1
        ledger = Ledger(bus, term)
        left = ledger.open(behind.ledger or Position())  # 2
        configured = Configured(fingerprint(c), code_revision(), behind.step)
        ledger.append([configured])
        versions.publish(behind.step, learner.snapshot(c.weights.dtype))  # 3
        with MetricsFile(folder.metrics / "trainer.jsonl") as metrics:
            for line in missing_lines(left.done, read_metrics(folder.metrics / "trainer.jsonl")):
                metrics.append(line)
            publisher = StepPublisher(store, versions, ledger, metrics, CheckpointRetention(c.checkpoints.keep))
            every = c.checkpoints.every
            out = ReplayOutput(publisher, ledger, c.weights.dtype, every, configured, term, left)
            if behind.ledger is None:
                state = out.state(behind.step, learner.updates)
                write_checkpoint(store, behind.step, term, learner.state(), state.encode())
            yield out
            publisher.close()
    finally:
        bus.close()


def _replay_store(folder: RunFolder, c: Configuration) -> ObjectStore:
    return open_store(store_url(c, folder.path), c.sync)
