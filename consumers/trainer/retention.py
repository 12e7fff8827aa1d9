"""Decides what the trainer must not delete yet (invariant 11): the weight versions that rollouts
need, and log records.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from rollstream.consumers.dispatch.persistence import read_persisted_state
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.errors import PositionLost
from rollstream.import_path import load_option
from rollstream.storage.claim_check import BlobCollector
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.checkpoints import CheckpointId, checkpoint_state
from rollstream.streams import fence
from rollstream.streams.bus import Bus, Message
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Position, RolloutStatus
from rollstream.streams.values import Address, Version

log = logging.getLogger(__name__)

LIVE_S = 60.0  # six default heartbeat timeouts; a rollout that is silent for longer pins no version
OVERLAP_S = 5.0  # two threads send statuses and partials: a partial may follow a later status


class HeldVersions:
    """The versions that live rollouts serve, by each one's last `status`. A rollout is live for
    `LIVE_S` after that was read.
    """

    def __init__(self, bus: Bus, monotonic: Callable[[], float] = time.monotonic) -> None:
        # This process's clock alone: a rollout whose clock is an hour ahead does not make the
        # others look dead.
        self._bus, self._monotonic = bus, monotonic
        self._reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._newest: dict[str, tuple[RolloutStatus, float]] = {}

    def __call__(self) -> set[Version]:
        now_s = self._monotonic()
        for batch in self._reader.batches_to(self._bus.end("status")):
            for received in batch:
                if isinstance(received.record, RolloutStatus):
                    self._observe(received.record, now_s)
        self._newest = {
            name: seen for name, seen in self._newest.items() if now_s - seen[1] < LIVE_S
        }
        # A rollout that is leaving takes no more work.
        return {v for s, _ in self._newest.values() if s.health != "leaving" for v in s.held}

    def _observe(self, status: RolloutStatus, now_s: float) -> None:
        self._newest[status.rollout] = status, now_s


@dataclass(slots=True)
class _VersionHold:
    # When the rollout was first seen without the version.
    ended_s: float | None = None
    # Ends of the topic `partials` at least `OVERLAP_S` later: all partials of the rollout under
    # this version are below.
    partials: Mapping[int, int] | None = None

    def is_known(self, positions: Mapping[int, Position]) -> bool:
        # `positions` are those up to which dispatch had read when it saved its state.
        return self.partials is not None and all(
            partition in positions and positions[partition].offset >= end
            for partition, end in self.partials.items()
            if end
        )


class PinnedVersions(HeldVersions):
    """The versions to keep under `keep_version`: an unfinished trajectory can be resumed only under
    its own version, from its partials.

    Dispatch saves these trajectories every few seconds (`dispatch/persistence.py`). One that the
    saved state lacks began under a version that its rollout held since the save. So these versions
    are kept until a later save includes their partials, even if the rollout dies or dispatch is
    down.
    """

    def __init__(
        self, bus: Bus, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(bus, monotonic)
        self._store = store
        self._holds: dict[tuple[str, Version], _VersionHold] = {}

    def __call__(self) -> set[Version]:
        served = super().__call__()
        self._end_holds(self._monotonic())
        saved = read_persisted_state(self._store)
        where = saved.where().get("partials", {}) if saved else {}
        self._holds = {
            key: hold for key, hold in self._holds.items() if not (saved and hold.is_known(where))
        }
        chain_versions = (chain.version for _, chain in saved.chains) if saved else ()
        return {
            *served,
            *(v for _, v in self._holds),
            *(v for v in chain_versions if v is not None),
        }

    def _observe(self, status: RolloutStatus, now_s: float) -> None:
        super()._observe(status, now_s)
        for version in status.held:
            self._holds[status.rollout, version] = _VersionHold()

    def _end_holds(self, now_s: float) -> None:
        ends: Mapping[int, int] | None = None
        for (rollout, version), hold in self._holds.items():
            seen = self._newest.get(rollout)
            status = None if seen is None else seen[0]
            is_held = status and version in status.held and status.health != "leaving"
            if hold.ended_s is None and not is_held:
                hold.ended_s = now_s
            if hold.ended_s is None or hold.partials is not None:
                continue
            if now_s - hold.ended_s >= OVERLAP_S:
                ends = self._bus.end("partials") if ends is None else ends
                hold.partials = ends


TOPICS = ("admissions", "trajectories", "annotations", "ledger", "applied")
"""Dispatch truncates `prompts`, `assignments` and `partials`."""


@dataclass(frozen=True, slots=True)
class LogTruncation:
    """Removes, after a checkpoint, the records below the least of these bounds:

    * the positions of a kept checkpoint, and the records of its open groups;
    * dispatch's committed position, in the topics from which it rebuilds its state;
    * the archive's committed position, in the `archived` topics.

    Without a committed position a topic is not truncated. Bounds only move forwards, so a replaced
    trainer that still runs truncates less than its successor.
    """

    bus: Bus
    store: ObjectStore
    archived: Collection[str]
    blobs: BlobCollector

    def run(self, checkpoints: Iterable[CheckpointId]) -> None:
        """Truncates records that no kept checkpoint needs, then deletes blobs (large records in the
        store) that no kept record names.
        """
        for topic in TOPICS:
            # A Kafka broker drops a position that was not committed for days.
            fence.renew_truncated(self.bus, topic)
        states = [
            TrainerState.decode(checkpoint_state(self.store, checkpoint))
            for checkpoint in checkpoints
        ]
        # Ahead: takes still to be repeated may name records before its positions.
        if not states or any(state.ahead for state in states):
            return
        for topic in TOPICS:
            bounds = [self._needed(topic, state) for state in states]
            if topic in fence.REBUILD_TOPICS:
                bounds.append(self.bus.committed(fence.DISPATCH_GROUP, topic))
            if topic in self.archived:
                bounds.append(self.bus.committed(fence.ARCHIVE_GROUP, topic))
            lost = fence.truncate(self.bus, topic, fence.earliest_positions(bounds))
            if lost:
                log.info("%s: %d records truncated", topic, sum(lost.values()))
        self.blobs.run()

    def _needed(self, topic: str, state: TrainerState) -> Mapping[int, Position]:
        if topic == "ledger":
            return {0: state.ledger}
        positions = state.intake_positions().get(topic)
        if positions is None:  # `applied`: a trainer does not read it
            return {p: Position(end) for p, end in self.bus.end(topic).items()}
        return fence.move_back_to_oldest(self.bus, topic, positions, _addresses(topic, state))


def _addresses(topic: str, state: TrainerState) -> Iterable[Address]:
    match topic:
        case "admissions":
            return (group.admitted for group in state.groups)
        case "trajectories":
            return (at for group in state.groups for at in group.arrived)
        case _:
            return (at for group in state.groups for at in group.noted)


ARCHIVED_LOG = "rollstream.storage.archive.log_view:LogView"


class ArchiveBackedBus(BusWrapper):
    """`read` returns truncated records from the archive, at the same offsets and byte for byte:
    needed only if checkpoints are lost or damaged, or the log was truncated otherwise.
    """

    def __init__(self, bus: Bus, store: ObjectStore, run: str) -> None:
        super().__init__(bus)
        self._store, self._run = store, run
        self._both: Bus | None = None

    def with_archive(self) -> Bus:
        """Returns log and archive as one read-only bus; a read raises `PositionLost` where neither
        has the record.
        """
        if self._both is None:
            # Imported here because it loads pyarrow, which takes seconds and is rarely needed.
            open_both: Callable[[Bus, ObjectStore, str], Bus] = load_option(ARCHIVED_LOG)
            self._both = open_both(self._below, self._store, self._run)
        return self._both

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        limits = {"records_max": records_max, "bytes_max": bytes_max}
        try:
            return self._below.read(topic, positions, **limits, wait_s=wait_s, exact=exact)
        except PositionLost:
            return self.with_archive().read(topic, positions, **limits, exact=exact)
