"""A rollout's store with a relay in front, and the trainer's with the chain behind."""

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollstream.errors import ObjectMissing, StoreError
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.relay import Relay
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.settings import RelaySettings
from rollstream.storage.stores.base import Data
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.manifest import manifest_key, read_manifest, version_folder
from rollstream.streams.records import RelayStatus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus, MemoryStore
from testbed.relay_network import RelayNet, manifest_of
from testbed.waiting import WAIT_S, wait_for

MIB = 1 << 20
V1 = Version(1, 1)
BIG = f"{version_folder(V1)}/model.safetensors"


@pytest.fixture
def net(tmp_path: Path) -> Iterator[RelayNet]:
    with RelayNet(tmp_path) as net:
        yield net


def files() -> dict[str, bytes]:
    return {"model.safetensors": os.urandom(2 * MIB)}


class Guarded(MemoryStore):
    """A bucket that counts its reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads.append(key)
        return super().get(key, start, end)


@pytest.mark.parametrize("sees_folder", [True, False])
def test_a_version_is_read_through_the_relay_and_the_bucket_is_left_alone(
    net: RelayNet, sees_folder: bool
) -> None:
    (relay,) = net.start("a")
    content, bucket = files(), Guarded()
    version = net.publish(1, content)
    folder = relay.folder if sees_folder else Path("/nonexistent")
    store = RelayStore(bucket, folder, "" if sees_folder else relay.url)
    manifest = read_manifest(store, version)  # waits: the relay has only got the announcement
    assert manifest == manifest_of(version, content)
    data = content["model.safetensors"]
    assert store.get(BIG) == data
    assert store.get(BIG, 5, 9) == data[5:9]
    assert store.get(BIG, MIB) == data[MIB:]
    assert store.get(BIG, MIB, 10 * MIB) == data[MIB:]
    assert bucket.reads == []
    assert store.relay_bytes == 2 * len(data) - 2 * MIB + len(data) + 4 + len(encode_json(manifest))


def test_a_range_past_the_end_is_empty_as_in_the_contract(net: RelayNet) -> None:
    (relay,) = net.start("a")
    net.publish(1, files())
    store = RelayStore(net.store, Path("/nonexistent"), relay.url)
    assert store.get(BIG, 2 * MIB) == b""
    assert store.get(BIG, 3 * MIB, 4 * MIB) == b""
    assert store.get(BIG, 7, 7) == b""


def test_what_a_relay_does_not_hold_comes_from_the_bucket_at_once(net: RelayNet) -> None:
    (relay,) = net.start("a", versions=1)
    old = {number: files() for number in (1, 2)}
    for number, content in old.items():
        net.publish(number, content)
    wait_for(lambda: relay.has(Version(2, 1)))
    store = net.store_for(relay)
    assert store.get(BIG) == old[1]["model.safetensors"]
    assert store.relay_bytes == 0
    with pytest.raises(ObjectMissing):
        store.get(f"{version_folder(V1)}/absent")
    store.put("other/key", b"x")
    assert (net.store.get("other/key"), store.read("other/key")[0]) == (b"x", b"x")


@pytest.mark.parametrize("fault", ["never started", "killed", "stopped", "gone in the middle"])
def test_a_rollout_never_fails_because_of_a_relay(
    net: RelayNet, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = files()
    url, folder = "http://127.0.0.1:9", Path("/nonexistent")
    if fault != "never started":
        slow = MIB // 4 if fault == "gone in the middle" else 0
        (relay,) = net.start("a", send_bytes_per_s=slow)
        url = relay.url
    version = net.publish(1, content)
    store = RelayStore(net.store, folder, url)
    if fault == "killed":
        relay.kill()  # pyright: ignore[reportPossiblyUnboundVariable]
    elif fault == "stopped":
        relay.send_signal(signal.SIGSTOP)  # pyright: ignore[reportPossiblyUnboundVariable]
    elif fault == "gone in the middle":
        wait_for(lambda: relay.has(version))  # pyright: ignore[reportPossiblyUnboundVariable]
        threading.Timer(1.0, relay.kill).start()  # pyright: ignore[reportPossiblyUnboundVariable]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert store.get(BIG) == content["model.safetensors"]
    assert len([r for r in caplog.records if "read from the bucket" in r.message]) == 1


def test_a_relay_that_comes_back_is_used_again(net: RelayNet) -> None:
    (relay,) = net.start("a")
    content = files()
    version = net.publish(1, content)
    now = [0.0]
    store = RelayStore(net.store, relay.folder, clock=lambda: now[0])
    relay.kill()
    (relay.folder / BIG).unlink(missing_ok=True)
    assert store.get(BIG) == content["model.safetensors"]
    (again,) = net.start("a")
    wait_for(lambda: again.has(version))
    now[0] = 60.0
    before = store.relay_bytes
    assert store.get(BIG) == content["model.safetensors"]
    assert store.relay_bytes == before + 2 * MIB


# ---- the trainer's side --------------------------------------------------------------------------


def test_without_relays_a_pushing_store_is_the_store(net: RelayNet) -> None:
    store, content = net.pushing(), files()
    manifest = net.write(1, content, store)
    assert read_manifest(net.store, V1) == manifest
    assert net.store.get(BIG) == content["model.safetensors"]
    wait_for(lambda: store.metric_values()["trainer_push_given_up_total"] == 2)


def test_a_relay_that_is_not_there_costs_the_push_and_nothing_else(net: RelayNet) -> None:
    for term in (1, 2):
        gone = RelayStatus(f"gone-{term}", term, "x", "http://127.0.0.1:9", (), "", time.time())
        publish(net.bus, "status", f"gone/{term}", gone)
    store, content = net.pushing(), files()
    net.write(1, content, store)
    wait_for(lambda: store.metric_values()["trainer_push_given_up_total"] == 2)
    assert net.store.get(BIG) == content["model.safetensors"]


def test_what_does_not_fit_the_bound_is_not_pushed_and_is_stored(net: RelayNet) -> None:
    (relay,) = net.start("a")
    store, content = net.pushing(bytes_max=MIB), files()
    version = net.announce(net.write(1, content, store))
    wait_for(lambda: relay.has(version))
    # The manifest fits. On a busy machine its push may be given up, or come after the announcement.
    assert relay.figure("bucket_bytes_total") >= 2 * MIB
    assert relay.figure("pushed_bytes_total") < MIB
    assert store.metric_values()["trainer_push_given_up_total"] in (1, 2)


def test_an_object_that_no_relay_can_keep_is_refused_with_the_setting_to_raise(
    net: RelayNet, caplog: pytest.LogCaptureFixture
) -> None:
    net.start("small", bytes_max=MIB)
    store, content = net.pushing(), files()
    net.write(1, content, store)
    wait_for(lambda: store.metric_values()["trainer_push_given_up_total"])
    wait_for(lambda: "raise relay.bytes_max" in caplog.text)
    assert f"{BIG} is not pushed: relay small keeps less than its" in caplog.text
    assert net.store.get(BIG) == content["model.safetensors"]


@pytest.mark.parametrize(("free", "kept"), [(1 << 20, 1 << 20), (1 << 40, 8 << 30)])
def test_a_relay_keeps_no_more_than_the_memory_of_its_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    kept: int,
) -> None:
    """With a bound above it no version would be evicted, and none could be received."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    bus = MemoryBus()
    bus.create(catalogue())
    relay = Relay(bus, MemoryStore(), RelaySettings(), "a", tmp_path / "relay")
    relay.close()
    assert relay.cache.bytes_max == kept
    assert ("relay.bytes_max is 8.59 GB, but" in caplog.text) == (free == kept)


class Broken(MemoryStore):
    """Fails for objects with a certain name."""

    def create(self, key: str, data: Data) -> str:
        if "broken" in key:
            raise StoreError(f"no space for {key}")
        return super().create(key, data)


def test_a_manifest_is_not_stored_when_an_object_before_it_was_not(net: RelayNet) -> None:
    """Invariant 6: the manifest last."""
    store = PushingStore(Broken(), RelayDirectory(net.bus, 5.0), MIB)
    store.create(f"{version_folder(V1)}/fine", b"x")
    store.create(f"{version_folder(V1)}/broken", b"x")
    assert store.get(f"{version_folder(V1)}/fine") == b"x"  # another reader clears no error
    with pytest.raises(StoreError, match="no space"):
        store.create(manifest_key(V1), b"{}")
    with pytest.raises(ObjectMissing):
        store.get(manifest_key(V1))


def test_the_same_object_again_is_accepted_and_another_under_its_key_is_refused(
    net: RelayNet,
) -> None:
    """Invariant 6: a created object never changes; a killed writer repeats itself."""
    store = PushingStore(MemoryStore(), RelayDirectory(net.bus, 5.0), MIB)
    for _ in range(2):
        store.create(BIG, bytearray(b"the same"))
    store.create(manifest_key(V1), b"{}")
    store.create(BIG, b"something else")
    with pytest.raises(StoreError, match="exists with other content"):
        store.create(manifest_key(V1), b"{}")
    assert store.get(BIG) == b"the same"


class Late(MemoryStore):
    """Writes wait until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def create(self, key: str, data: Data) -> str:
        assert self.go.wait(WAIT_S)
        return super().create(key, data)


def test_a_slow_store_does_not_hold_up_what_relays_get(net: RelayNet) -> None:
    (relay,) = net.start("a")
    late, content = Late(), files()
    store = PushingStore(late, RelayDirectory(net.bus, 5.0), 8 * MIB)
    writer = threading.Thread(target=net.write, args=(1, content, store))
    writer.start()
    wait_for(lambda: relay.has(V1))
    assert list(late.list()) == []
    late.go.set()
    writer.join()
    assert {entry.key for entry in late.list()} == {BIG, manifest_key(V1)}


def test_another_users_shared_memory_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first user to make the folder could supply weights: xxh3 detects accidents, not
    attacks.
    """
    key = f"weights/{Version(1, 1)}/model.safetensors"
    folder, bucket = tmp_path / "relay", MemoryStore()
    bucket.put(key, b"the trainer's")
    (folder / key).parent.mkdir(parents=True)
    (folder / key).write_bytes(b"another's")
    (folder / "url").write_text("http://127.0.0.1:1")
    store = RelayStore(bucket, folder)
    assert store.get(key) == b"another's"
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert [store.get(key) for _ in range(3)] == [b"the trainer's"] * 3
    assert [r.message for r in caplog.records] == [
        f"versions are read from the bucket: {(folder / key).parent} belongs to another user"
    ]
