"""Faults that seeded crashes found, each reproduced by itself."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.checkpoint import TrainerState, restore_intake, trainer_state
from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.publisher import CheckpointRetention, StepPublisher
from rollstream.consumers.trainer.retention import LogTruncation
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import Fenced
from rollstream.storage.claim_check import BlobCollector
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.weights.checkpoints import stored_checkpoints, write_checkpoint
from rollstream.storage.weights.manifest import version_folder
from rollstream.storage.weights.pointer import advance_pointer, take_pointer
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.fence import DISPATCH_GROUP, TRUNCATED_GROUP
from rollstream.streams.reader import from_begin, from_end
from rollstream.streams.records import (
    Admitted,
    Fence,
    GroupClosed,
    Position,
    StepDone,
    Take,
    Trajectory,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Span, Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus, MemoryStore


def memory_bus() -> MemoryBus:
    bus = MemoryBus()
    bus.create(catalogue(1))
    return bus


def test_a_checkpoint_made_while_later_steps_are_repeated_does_not_pass_over_their_takes() -> None:
    """A first trainer took for steps 1 to 3 and died; a second repeated step 1 and died."""
    bus = memory_bus()
    first = Ledger(bus, 1)
    first.open(Position())
    first.append([Take(step, 0, 0, (), (), ()) for step in (1, 2, 3)])
    recorded = Ledger(bus, 2).open(Position())
    assert recorded.goes_beyond(1)
    assert recorded.goes_beyond(2)
    assert not recorded.goes_beyond(3)
    third = Ledger(bus, 3).open(recorded.since)
    assert sorted(step for step, _ in third.takes) == [1, 2, 3]


def test_nothing_is_truncated_while_a_checkpoint_has_takes_of_later_steps_ahead() -> None:
    """Invariant 11: they name completions before the positions of that checkpoint."""
    bus, store = memory_bus(), MemoryStore()
    for group in range(4):
        publish(bus, "trajectories", str(group), completion(group))
    end = {"trajectories": from_end(bus, "trajectories")}
    bus.commit(DISPATCH_GROUP, "trajectories", end["trajectories"])
    for ahead, begin in ((True, 0), (False, 3)):
        intake = GroupIntake(bus, end | beginnings(bus), lambda: 0.0)
        state = trainer_state(2, 2, Position(), intake, "", ahead)
        kept = write_checkpoint(store, 2 + (not ahead), 1, {}, state.encode())
        LogTruncation(bus, store, (), BlobCollector(bus, store)).run([kept])
        assert bus.begin("trajectories")[0] == begin


class ForgetfulBus(MemoryBus):
    """Forgets the positions that were not committed again, as a broker does after days."""

    def forget(self) -> None:
        self.renewed: dict[str, set[int]] = {}

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        super().commit(group, topic, positions)
        if group == TRUNCATED_GROUP:
            self.renewed.setdefault(topic, set()).update(positions)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_checkpoint_that_truncates_nothing_still_commits_where_topics_begin(ahead: bool) -> None:
    """Invariant 7: without the committed fence, a zombie's record could be first."""
    bus, store = ForgetfulBus(), MemoryStore()
    bus.create(catalogue(1))
    bus.forget()
    for topic in ("trajectories", "ledger"):
        bus.commit(TRUNCATED_GROUP, topic, {0: Position(0, Fence(3, 2))})
    bus.forget()
    intake = GroupIntake(bus, beginnings(bus) | {"trajectories": {0: Position(0)}}, lambda: 0.0)
    state = trainer_state(2, 2, Position(), intake, "", ahead)
    kept = write_checkpoint(store, 2, 1, {}, state.encode())
    LogTruncation(bus, store, (), BlobCollector(bus, store)).run([kept])
    assert bus.renewed == {"trajectories": {0}, "ledger": {0}}
    assert bus.committed(TRUNCATED_GROUP, "ledger") == {0: Position(0, Fence(3, 2))}


def completion(group: int) -> Trajectory:
    return Trajectory(
        trajectory=f"{group}.0", group=group, index=0, attempt=1, task="t", rollout="rollout-0",
        rollout_term=1, tokens=np.zeros(2, np.uint32), sources=np.array([0, 1], np.uint8),
        logprobs=np.zeros(1, np.float32), spans=(Span(0, 1, Version(0, 1)),), finish="stop",
        reward=0.0, trainer_version=Version(0, 1), started_s=1.0, finished_s=2.0,
    )  # fmt: skip


def beginnings(bus: MemoryBus) -> dict[str, dict[int, Position]]:
    return {topic: from_begin(bus, topic) for topic in ("admissions", "annotations")}


def test_a_close_that_is_still_ahead_counts_as_ahead() -> None:
    bus = memory_bus()
    first = Ledger(bus, 1)
    first.open(Position())
    first.append([GroupClosed(4, "dead", "", 2)])
    assert Ledger(bus, 2).open(Position()).goes_beyond(1)


def test_a_group_that_ended_before_its_admission_was_read_stays_ended_over_a_checkpoint() -> None:
    """Invariant 2: its successor reads the admission, and must not train the group again."""
    bus = memory_bus()
    positions = {topic: from_begin(bus, topic) for topic in GroupIntake.TOPICS}
    intake = GroupIntake(bus, positions, lambda: 0.0)
    intake.end(5)
    kept = TrainerState.decode(trainer_state(1, 1, Position(), intake, "").encode())
    after = GroupIntake(bus, kept.intake_positions(), lambda: 0.0)
    restore_intake(after, kept)
    admissions = FencedWriter(bus, "admissions", "dispatch", 1)
    admissions.open()
    admissions.append([("5", Admitted(5, 0, ("5.0",), 60.0, Address(0, 0)))])
    after.read()
    assert not after.open
    assert not after.ended


def test_a_manifest_that_a_zombie_wrote_after_its_files_were_cleared_is_no_violation() -> None:
    """Invariant 6: a version of a fenced term is never believed; a believed one must be
    complete.
    """
    bus, store = memory_bus(), MemoryStore()
    tensors = {"w": torch.zeros(4, 4)}
    files = {"config.json": b"{}"}
    take_pointer(store, "run", 1)
    zombies = publish_version(store, NewVersion("run", Version(1, 1), tensors, files, 1 << 20, 1.0))
    take_pointer(store, "run", 2)
    believed = publish_version(
        store, NewVersion("run", Version(1, 2), tensors, files, 1 << 20, 1.0)
    )
    advance_pointer(store, believed)
    ledger = Ledger(bus, 2)
    ledger.open(Position())
    ledger.append([StepDone(1, believed.version, "", 0, {}, {}, 0.0)])
    store.delete(f"{version_folder(zombies.version)}/config.json")
    assert missing_files(bus, store) == []
    store.delete(f"{version_folder(believed.version)}/config.json")
    assert missing_files(bus, store) == [f"{version_folder(believed.version)}/config.json"]


def missing_files(bus: MemoryBus, store: MemoryStore) -> list[str]:
    results = Audit(bus, store, "run", AuditPolicy(1, False)).check()
    offenders = [offender for result in results for offender in result.offenders]
    return [offender.key for offender in offenders if offender.what == "it is missing"]


def test_a_trainer_that_stood_still_before_it_cleared_up_clears_nothing_up(tmp_path: Path) -> None:
    """Its successor reads the older checkpoint, and the records behind it (invariant 11)."""
    bus, store = memory_bus(), MemoryStore()
    for step in (2, 4):
        write_checkpoint(store, step, 1, {}, {"step": step})
    versions = VersionWriter(
        store, FencedWriter(bus, "weights", "trainer", 1), "run", 1, WeightsSettings(), {}, set
    )
    with MetricsFile(tmp_path / "lines") as lines:
        publisher = StepPublisher(store, versions, Ledger(bus, 1), lines, CheckpointRetention(1))
        take_pointer(store, "run", 2)
        with pytest.raises(Fenced, match="term 2 decides"):
            publisher.clean_up()
        publisher.close()
    assert [one.id.step for one in stored_checkpoints(store)] == [2, 4]


def test_a_trainer_that_is_replaced_between_two_deletions_deletes_no_more(tmp_path: Path) -> None:
    """It was frozen after its listing: its successor reads one of the listed checkpoints."""

    class Frozen(MemoryStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            if key.endswith("manifest.json"):
                take_pointer(self, "run", 2)

    bus, store = memory_bus(), Frozen()
    for step in (2, 4, 6):
        write_checkpoint(store, step, 1, {}, {"step": step})
    versions = VersionWriter(
        store, FencedWriter(bus, "weights", "trainer", 1), "run", 1, WeightsSettings(), {}, set
    )
    with MetricsFile(tmp_path / "lines") as lines:
        publisher = StepPublisher(store, versions, Ledger(bus, 1), lines, CheckpointRetention(1))
        with pytest.raises(Fenced, match="term 2 decides"):
            publisher.clean_up()
        publisher.close()
    assert [one.id.step for one in stored_checkpoints(store)] == [4, 6]
