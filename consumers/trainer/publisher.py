"""Publishes finished steps in order, in a thread, while the next step is trained. A slow store
delays versions, not steps, until `QUEUE_MAX` snapshots wait. A restarted trainer repeats an
interrupted step with the same bytes.

Reading list: after `consumers/trainer/learn/learner.py`, before `storage/weights/publish.py`.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from rollstream.consumers.trainer.deletions import DeletionThread
from rollstream.consumers.trainer.learn.workers import BufferPool
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.retention import LogTruncation
from rollstream.consumers.trainer.totals import TrainerTotals, step_line
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.checkpoints import (
    delete_checkpoints,
    plan_checkpoints,
    stored_checkpoints,
    write_checkpoint,
)
from rollstream.storage.weights.manifest import combined_hash
from rollstream.storage.weights.pointer import check_term
from rollstream.storage.weights.tensors import Tensors, tensor_hashes
from rollstream.streams.records import StepDone
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

QUEUE_MAX = 2  # steps that wait to be published
ROOM_POLL_S = 0.005  # between two checks for room in the queue
THREADS = 1  # torch threads of the publisher's arithmetic: the learner uses the other cores


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The publisher adds hashes, version and time to its `StepDone`; `tensors` to publish are a
    copy; `checkpoint` (tensors, JSON part) if one is due.
    """

    done: StepDone
    tensors: Tensors
    checkpoint: tuple[Tensors, Mapping[str, Any]] | None
    known: StepDone | None
    """The ledger's, if an earlier term finished this step."""
    lags: Mapping[int, int]
    outcomes: Mapping[str, int]
    is_lent: bool = False
    """The checkpoint's tensors are the learner's own state: the next update must wait until they
    are written (`StepPublisher.await_lent`).
    """


def copied_state_hash(tensors: Tensors) -> str:
    """The `state_hash` of a checkpoint's copy of a large state."""
    return combined_hash(*tensor_hashes(tensors))


def _is_recorded(recorded: StepDone | None, done: StepDone) -> bool:
    # With another state the step is recorded again, a fork of the recorded one.
    if recorded is None or recorded.has_same_state(done):
        return recorded is not None
    log.warning(
        "step %d differs from the ledger's (%s, recorded %s): the run continues as a fork",
        done.step,
        done.state_hash or done.weights_hash,
        recorded.state_hash or recorded.weights_hash,
    )
    return False


@dataclass(frozen=True, slots=True)
class CheckpointRetention:
    """How many checkpoints are kept; `truncation` truncates topics up to what they need (None:
    not).
    """

    checkpoints: int
    truncation: LogTruncation | None = None


class StepPublisher:
    """Publishes steps in a thread. An exception there or in the deletion thread is raised again in
    the trainer's: by `submit`, `check`, `await_room`, `await_lent`, `close`.

    The stages of a step (docs/reference/invariants.md, A trainer's step):

    1. Write the version's objects, the manifest last; none if the version is believed already. Are
       its bits others, the run continues as a fork, and the next version is an anchor.
    2. Swap `latest.json`: the version is believed.
    3. Announce the version.
    4. Append `StepDone`.
    5. Write the checkpoint if one is due.
    6. Delete what nothing needs any more, in the deletion thread.

    On ranks other than 0 it only writes this rank's tensors in stages 1 and 5, without ledger,
    metrics and retention.
    """

    def __init__(
        self,
        store: ObjectStore,
        versions: VersionWriter,
        ledger: Ledger | None,
        metrics: MetricsFile | None,
        retention: CheckpointRetention | None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._timer = timer
        self._store, self._versions, self._ledger = store, versions, ledger
        self._metrics, self._retention, self._clock = metrics, retention, clock
        self._queue: queue.Queue[StepSnapshot | None] = queue.Queue(QUEUE_MAX)
        self._failed: BaseException | None = None
        # A version's tensors are the base of the next delta, so their memory is reused only once
        # the next version is published: those of `QUEUE_MAX` waiting steps, of the one being
        # published, and of the one before exist at most.
        self.weight_buffers = BufferPool(QUEUE_MAX + 2)
        """To be taken from after `await_room` only."""
        self.state_buffers = BufferPool(QUEUE_MAX + 1, idle_max=1)
        """For checkpoints; to be taken from after `await_room` only."""
        self._published: Tensors = {}
        self._checkpoint_s = timer()
        self._lent = threading.Event()
        self.totals = TrainerTotals()
        self._deletions = DeletionThread(self.delete_unneeded)
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The believed version's; 0 before the first."""
        highest = self._versions.highest
        return 0 if highest is None else highest.number

    def checkpoint_age_s(self) -> float:
        """Returns the seconds since the last checkpoint or the start."""
        return self._timer() - self._checkpoint_s

    def waiting(self) -> int:
        return self._queue.qsize()

    def await_room(self) -> None:
        """Waits until fewer than `QUEUE_MAX` steps are queued: then `submit` returns at once, and
        the pools have memory for a snapshot.
        """
        while self._queue.full():
            self.check()
            time.sleep(ROOM_POLL_S)
        self.check()

    def await_lent(self) -> None:
        """Waits while a checkpoint is written from the learner's own state (`Learner.lends_state`),
        which each update changes.
        """
        while self._lent.is_set():
            self.check()
            time.sleep(ROOM_POLL_S)

    def submit(self, snapshot: StepSnapshot) -> None:
        """Takes a step whose tensors are from `weight_buffers` and `state_buffers`; returns at once
        after `await_room`.
        """
        if snapshot.is_lent:
            self._lent.set()
        self._offer(snapshot)

    def check(self) -> None:
        """Raises the exception that ended one of the threads."""
        failed = self._failed or self._deletions.failed
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Publishes all queued steps and finishes the deletions."""
        self._offer(None)
        self._thread.join()
        self.check()

    def _offer(self, item: StepSnapshot | None) -> None:
        while True:
            self.check()
            try:
                self._queue.put(item, timeout=0.5)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        torch.set_num_threads(THREADS)  # OpenMP's count is per thread
        try:
            while (snapshot := self._queue.get()) is not None:
                self.publish(snapshot)
                self._deletions.request(snapshot.checkpoint is not None)
        except BaseException as error:
            log.exception("publishing failed")
            self._failed = error
        finally:
            self._deletions.close()

    def publish(self, snapshot: StepSnapshot) -> None:
        started = self._timer()
        version = self._versions.publish(snapshot.done.step, snapshot.tensors)  # 1, 2, 3
        self.weight_buffers.release(self._published)
        self._published = snapshot.tensors
        done, hashes = self._hashed(snapshot, version)
        done = replace(done, version=version, time_s=self._clock())
        if not _is_recorded(snapshot.known, done):
            self._record(done, snapshot, started)  # 4
        else:
            self.totals.repeated += 1
        if snapshot.checkpoint is not None:
            tensors, state = snapshot.checkpoint
            term, json_state = self._versions.term, state if self._versions.leads else None
            write_checkpoint(self._store, done.step, term, tensors, json_state, hashes=hashes)  # 5
            self._checkpoint_s = self._timer()
            self.state_buffers.release(tensors)
            if snapshot.is_lent:
                self._lent.clear()

    def _record(self, done: StepDone, snapshot: StepSnapshot, started: float) -> None:
        if self._ledger is not None:
            self._ledger.append([done])
        seconds = self._timer() - started
        if self._metrics is not None:
            self._metrics.append(step_line(done, seconds))
        self.totals.add(done, snapshot.lags, snapshot.outcomes, seconds)

    def delete_unneeded(self, has_checkpoint: bool) -> None:
        if self._retention is None:
            return
        # A new checkpoint alone makes older ones, and the records they need, superfluous.
        if has_checkpoint:
            self.clean_up()
        self._versions.retain()

    def _hashed(
        self, snapshot: StepSnapshot, version: Version
    ) -> tuple[StepDone, Mapping[str, str] | None]:
        done = snapshot.done
        # The trainer has hashed a small state already. A large one is hashed here, at checkpoints
        # alone, so that the next steps do not wait; the checkpoint's manifest reuses the hashes.
        if done.state_hash:
            return done, None
        # Each step of a large state has at least the hash of its published tensors.
        weights = self._versions.weights_hash(version, snapshot.tensors)
        if snapshot.checkpoint is None:
            return replace(done, weights_hash=weights), None
        hashes, tied = tensor_hashes(snapshot.checkpoint[0])
        state = combined_hash(hashes, tied)
        return replace(done, weights_hash=weights, state_hash=state), hashes

    def clean_up(self) -> None:
        retention = self._retention
        assert retention is not None, "a rank that does not lead deletes nothing"
        stored = stored_checkpoints(self._store)
        unwanted = plan_checkpoints(stored, retention.checkpoints)
        # Before each deletion: a trainer that was suspended after its listing would otherwise
        # delete what its successor reads.
        for checkpoint in unwanted:
            check_term(self._store, self._versions.term)
            delete_checkpoints(self._store, [checkpoint])
        check_term(self._store, self._versions.term)
        if retention.truncation is not None:
            retention.truncation.run(s.id for s in stored if s.whole and s.id not in unwanted)
