"""Publishing beside training: the bits of each version are those of its step, although snapshots
share memory; a slow store delays versions, not steps, within a bound.
"""

import threading
from pathlib import Path

import pytest
import torch

from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.publisher import (
    QUEUE_MAX,
    CheckpointRetention,
    StepPublisher,
    StepSnapshot,
    copied_state_hash,
)
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import StoreError
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.base import Data
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.checkpoints import CheckpointId, read_checkpoint, stored_checkpoints
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.retention import stored_versions
from rollstream.storage.weights.tensors import tensor_hash, untie
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Position, StepDone
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

STEPS = 9
FILES = {"config.json": b"{}"}


class Gate(FileStore):
    """A store whose creations wait while the gate is closed, and fail when it is full."""

    gate: threading.Event
    full = False
    deletions: threading.Event | None = None
    """Deletions wait for it, if there is one."""

    def create(self, key: str, data: Data) -> str:
        self.gate.wait()
        if self.full:
            raise StoreError("no space left")
        return super().create(key, data)

    def delete(self, key: str) -> None:
        if self.deletions is not None:
            self.deletions.wait()
        super().delete(key)


def weights(step: int) -> dict[str, torch.Tensor]:
    """A few elements change at each step, so that versions are deltas."""
    draw = torch.Generator().manual_seed(0)
    embedding = torch.randn(64, 32, generator=draw)
    for number in range(step):
        embedding[number * 3 : number * 3 + 2, number] = number
    return {"embed": embedding, "norm": torch.ones(32) * step, "head": embedding}


def opened(folder: Path, versions_max: int = 16, checkpoints: int = STEPS):
    """A publisher over a log and a gated store in `folder`."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue(1))
    store = Gate(folder / "store")
    store.gate = threading.Event()
    store.gate.set()
    writer = FencedWriter(bus, "weights", "trainer", 1)
    settings = WeightsSettings(versions_max=versions_max)
    versions = VersionWriter(store, writer, "r", 1, settings, FILES, lambda: ())
    versions.open()
    ledger = Ledger(bus, 1)
    ledger.open(Position())
    publisher = StepPublisher(
        store, versions, ledger, MetricsFile(folder / "m.jsonl"), CheckpointRetention(checkpoints)
    )
    return publisher, store, bus


@pytest.fixture
def publishing(tmp_path: Path):
    publisher, store, bus = opened(tmp_path)
    yield publisher, store
    store.gate.set()
    bus.close()


def hand_over(
    publisher: StepPublisher, step: int, checkpoint: bool = False, is_lent: bool = False
) -> None:
    """Publishes as the trainer does."""
    publisher.await_room()
    done = StepDone(step, Version(step, 1), "", 1, {}, {}, 0.0)
    kept = (
        (publisher.state_buffers.copy(weights(step), None), {"step": step}) if checkpoint else None
    )
    tensors = publisher.weight_buffers.copy(weights(step), torch.bfloat16)
    publisher.submit(StepSnapshot(done, tensors, kept, None, {}, {}, is_lent))
    assert publisher.weight_buffers.in_use <= QUEUE_MAX + 2
    assert publisher.state_buffers.in_use <= QUEUE_MAX + 1


def test_each_tensor_of_a_version_and_of_a_checkpoint_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counted(dtype: str, shape: tuple[int, ...], data: Data) -> str:
        hashed.append(len(data))
        return tensor_hash(dtype, shape, data)

    for module in ("tensors", "shards", "differences"):
        monkeypatch.setattr(f"rollstream.storage.weights.{module}.tensor_hash", counted)
    publisher, store, bus = opened(tmp_path)
    for step in range(STEPS):
        hand_over(publisher, step, checkpoint=True)
    publisher.close()
    numbers = sum(tensor.numel() for tensor in untie(weights(0))[0].values())
    assert sum(hashed) <= STEPS * numbers * (4 + 2)  # float32 in checkpoints, bfloat16 in versions
    last = read_checkpoint(store, CheckpointId(1, STEPS - 1))  # verifies every hash
    monkeypatch.undo()
    done = Ledger(bus, 2).open(Position()).done[STEPS - 1]
    bus.close()
    assert done.state_hash == copied_state_hash(last.tensors)


def test_every_version_and_checkpoint_has_the_bits_of_its_step(publishing) -> None:
    publisher, store = publishing
    for step in range(STEPS):
        hand_over(publisher, step, checkpoint=True)
    publisher.close()
    kinds = set()
    for step in range(STEPS):
        manifest, tensors = fetch_tensors(store, Version(step, 1))
        kinds.add(manifest.kind)
        kept = read_checkpoint(store, CheckpointId(1, step)).tensors
        for name, wanted in weights(step).items():
            assert torch.equal(tensors[name], wanted.bfloat16()), (step, name)
            assert torch.equal(kept[name], wanted), (step, name)
    assert kinds == {"anchor", "delta"}
    assert publisher.weight_buffers.in_use == 1, (
        "the newest version's tensors are the next delta's base"
    )
    assert publisher.state_buffers.in_use == 0


def test_a_slow_store_delays_versions_not_steps_within_the_bound(publishing) -> None:
    """Invariant 8. While the store stands still, `QUEUE_MAX` steps beyond the one being published
    are accepted at once; the next waits until there is room.
    """
    publisher, store = publishing
    store.gate.clear()
    hand_over(publisher, 0)
    while publisher.waiting():  # it is being published
        threading.Event().wait(0.005)
    for step in range(1, 1 + QUEUE_MAX):
        hand_over(publisher, step)
    assert publisher.waiting() == QUEUE_MAX
    went_on = threading.Event()

    def next_step() -> None:
        hand_over(publisher, 1 + QUEUE_MAX)
        went_on.set()

    thread = threading.Thread(target=next_step)
    thread.start()
    assert not went_on.wait(0.3)
    store.gate.set()
    thread.join()
    publisher.close()
    assert publisher.version == 1 + QUEUE_MAX


def test_no_version_waits_for_deletions_and_none_is_left_out(tmp_path: Path) -> None:
    publisher, store, bus = opened(tmp_path, versions_max=4, checkpoints=2)
    store.deletions = threading.Event()
    for step in range(STEPS):
        hand_over(publisher, step, checkpoint=True)
    while publisher.version < STEPS - 1:
        threading.Event().wait(0.005)
    assert len(stored_versions(store)) == STEPS
    store.deletions.set()
    publisher.close()
    versions = {stored.version.number for stored in stored_versions(store)}
    assert STEPS - 1 in versions
    assert len(versions) <= 4
    assert [one.id.step for one in stored_checkpoints(store)] == [STEPS - 2, STEPS - 1]
    bus.close()


def test_what_fails_in_a_deletion_ends_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(keys: object) -> None:
        raise StoreError("not today")

    publisher, store, bus = opened(tmp_path, versions_max=4)
    monkeypatch.setattr(store, "delete_all", fail)

    def run() -> None:
        for step in range(STEPS):
            hand_over(publisher, step)
        publisher.close()

    with pytest.raises(StoreError, match="not today"):
        run()
    bus.close()


def test_the_next_update_waits_until_a_lent_state_is_written(publishing) -> None:
    publisher, store = publishing
    store.gate.clear()
    hand_over(publisher, 0, checkpoint=True, is_lent=True)
    updated = threading.Event()

    def update() -> None:
        publisher.await_lent()
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert not updated.wait(0.3)
    store.gate.set()
    thread.join()
    assert read_checkpoint(store, CheckpointId(1, 0)).state == {"step": 0}
    publisher.close()


def test_a_failure_ends_the_wait_for_a_lent_state(publishing) -> None:
    publisher, store = publishing
    store.full = True
    hand_over(publisher, 0, checkpoint=True, is_lent=True)
    with pytest.raises(StoreError, match="no space"):
        publisher.await_lent()


def test_what_fails_in_the_thread_ends_the_wait_for_room(publishing) -> None:
    publisher, store = publishing
    hand_over(publisher, 0)
    store.full = True

    def release() -> None:
        for step in range(1, 10):
            hand_over(publisher, step)

    with pytest.raises(StoreError, match="no space"):
        release()
