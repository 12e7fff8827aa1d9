"""The trainer's versions: when they are anchors, across restarts and forks."""

import pytest
import torch

from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.manifest import manifest_key, read_manifest
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus, MemoryStore

FILES = {"config.json": b"{}"}


@pytest.fixture
def bus():
    bus = MemoryBus()
    bus.create(catalogue())
    return bus


@pytest.fixture
def store():
    return MemoryStore()


def opened(bus, store, term, files=FILES, held=(), **settings):
    fenced = FencedWriter(bus, "weights", "trainer", term)
    settings = WeightsSettings(**settings)
    writer = VersionWriter(store, fenced, "run", term, settings, files, lambda: held)
    writer.open()
    return writer


def tensors_at(number, fork=0):
    torch.manual_seed(0)
    weight = torch.randn(200, 100)
    weight.view(-1)[: 50 * number + fork] += 1.0
    return {"weight": weight, "head": weight}


def kinds(store, *versions):
    return [read_manifest(store, version).kind for version in versions]


def test_versions_are_deltas_between_anchors_every_k(bus, store):
    writer = opened(bus, store, 1, anchor_every=3, versions_max=20)
    versions = [writer.publish(number, tensors_at(number)) for number in range(7)]
    assert kinds(store, *versions) == ["anchor", "delta", "delta"] * 2 + ["anchor"]
    assert read_manifest(store, versions[3]).delta is not None
    for version in versions:
        assert torch.equal(
            fetch_tensors(store, version)[1]["weight"], tensors_at(version.number)["weight"]
        )


def test_the_chain_is_no_longer_than_half_of_what_is_kept(bus, store):
    writer = opened(bus, store, 1, anchor_every=25, versions_max=4)
    versions = [writer.publish(number, tensors_at(number)) for number in range(5)]
    assert kinds(store, *versions) == ["anchor", "delta", "anchor", "delta", "anchor"]


def test_deltas_that_sum_to_a_third_of_a_full_version_end_the_chain(bus, store):
    writer = opened(bus, store, 1, versions_max=50)
    torch.manual_seed(1)
    versions = [writer.publish(n, {"a": torch.randn(500)}) for n in range(4)]
    assert kinds(store, *versions) == ["anchor", "delta", "anchor", "delta"]


def test_without_deltas_every_version_is_whole(bus, store):
    writer = opened(bus, store, 1, deltas=False)
    versions = [writer.publish(number, tensors_at(number)) for number in range(3)]
    assert kinds(store, *versions) == ["anchor"] * 3
    assert read_manifest(store, versions[2]).delta is None


def test_an_announcement_describes_its_version(bus, store):
    reader = TopicReader(bus, "weights", from_begin(bus, "weights"))
    writer, announced = opened(bus, store, 1), []
    for number in range(2):
        writer.publish(number, tensors_at(number))
        announced += [one.record for one in reader.poll(0.0)]
    announced = [record for record in announced if isinstance(record, WeightsAnnounced)]
    assert [(record.kind, record.parent) for record in announced] == [
        ("anchor", None),
        ("delta", Version(0, 1)),
    ]
    manifest = read_manifest(store, Version(1, 1), announced[1].manifest_hash)
    assert announced[1].bytes == manifest.bytes < announced[0].bytes / 5


@pytest.mark.parametrize("repeats", [True, False])
def test_a_restarted_trainer_continues_the_chain_of_the_older_term(bus, store, repeats):
    writer = opened(bus, store, 1)
    for number in range(3):
        writer.publish(number, tensors_at(number))
    second = opened(bus, store, 2)
    if repeats:  # its checkpoint was older: it trains steps 1 and 2 again
        assert second.publish(1, tensors_at(1)) == Version(1, 2)
        assert second.publish(2, tensors_at(2)) == Version(2, 1)
    version = second.publish(3, tensors_at(3))
    manifest = read_manifest(store, version)
    assert (manifest.kind, manifest.parent, manifest.anchor) == (
        "delta",
        Version(2, 1),
        Version(0, 1),
    )
    assert torch.equal(fetch_tensors(store, version)[1]["weight"], tensors_at(3)["weight"])


def test_a_fork_continues_with_an_anchor_alone(bus, store, caplog):
    writer = opened(bus, store, 1)
    for number in range(3):
        writer.publish(number, tensors_at(number))
    second = opened(bus, store, 2)
    assert second.publish(2, tensors_at(2, fork=7)) == Version(2, 1)
    version = second.publish(3, tensors_at(3, fork=7))
    manifest = read_manifest(store, version)
    assert (manifest.kind, manifest.delta) == ("anchor", None)
    assert "other bits" in caplog.text
    assert kinds(store, second.publish(4, tensors_at(4, fork=7))) == ["delta"]


def test_other_model_files_need_an_anchor(bus, store):
    opened(bus, store, 1).publish(0, tensors_at(0))
    second = opened(bus, store, 2, files={"config.json": b'{"more": 1}'})
    assert kinds(store, second.publish(1, tensors_at(1))) == ["anchor"]
    assert kinds(store, second.publish(2, tensors_at(2))) == ["delta"]


def test_a_broken_chain_is_ended_by_an_anchor(bus, store, caplog):
    writer = opened(bus, store, 1)
    for number in range(3):
        writer.publish(number, tensors_at(number))
    store.delete(manifest_key(Version(0, 1)))
    second = opened(bus, store, 2)
    assert kinds(store, second.publish(3, tensors_at(3))) == ["anchor"]
    assert "broken" in caplog.text


@pytest.mark.parametrize("damage", [b"{}", None])
@pytest.mark.parametrize("repeats", [True, False])
def test_after_a_damaged_manifest_of_the_believed_version_comes_an_anchor(
    bus, store, caplog, damage, repeats
):
    writer = opened(bus, store, 1)
    for number in range(3):
        writer.publish(number, tensors_at(number))
    if damage is None:
        store.delete(manifest_key(Version(2, 1)))
    else:
        store.put(manifest_key(Version(2, 1)), damage)
    second = opened(bus, store, 2)
    assert "v00000002-t0001 cannot be read" in caplog.text
    assert "the next one is an anchor" in caplog.text
    if repeats:
        assert second.publish(2, tensors_at(2)) == Version(2, 1)
        assert second.weights_hash(Version(2, 1), tensors_at(2))
    version = second.publish(3, tensors_at(3))
    assert kinds(store, version) == ["anchor"]
    assert torch.equal(fetch_tensors(store, version)[1]["weight"], tensors_at(3)["weight"])
    second.retain()
    assert kinds(store, second.publish(4, tensors_at(4))) == ["delta"]


def test_a_base_of_a_version_that_a_rollout_holds_stays(bus, store):
    writer = opened(bus, store, 1, versions_max=4, held={Version(1, 1)})
    for number in range(3):
        writer.publish(number, tensors_at(number))
        writer.retain()
    assert torch.equal(fetch_tensors(store, Version(1, 1))[1]["weight"], tensors_at(1)["weight"])
