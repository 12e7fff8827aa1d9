"""Named weight streams: their keys, topics, terms and names, beside those of the policy."""

from typing import Any

import pytest
import torch

from rollstream.errors import ConfigurationError, Fenced
from rollstream.storage.identity import mark_deleted, read_or_create_identity
from rollstream.storage.relay.object import version_of
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.named_streams import (
    POLICY,
    STREAMS_MAX,
    WeightStream,
    named_streams,
    run_streams,
    split_key,
)
from rollstream.storage.weights.pointer import POINTER_KEY, believed_pointer
from rollstream.storage.weights.retention import VersionPins, listed_versions
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.topics import RECORD_BYTES_MAX, Topic, catalogue, run_topic
from rollstream.streams.values import Version
from testbed.memory import MemoryBus, MemoryStore
from testbed.versions import publish_small, small_tensors

DRAFT, CRITIC = WeightStream("draft"), WeightStream("critic-2")


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    bus.create(catalogue())
    return bus


def keys(store) -> list[str]:
    return [entry.key for entry in store.list()]


@pytest.mark.parametrize(
    "name", ["-a", "a/b", "..", "a.b", "a b", "é", "a\n", "a_b", "a" * 65, "../weights"]
)
def test_a_name_that_keys_and_topics_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="letters, digits and '-'"):
        WeightStream(name)


def test_the_policy_s_stream_has_the_keys_and_the_topic_that_it_had() -> None:
    store = MemoryStore()
    assert POLICY.part(store) is store
    assert POLICY.topic == Topic(
        "weights", 1, "compact", record_bytes_max=RECORD_BYTES_MAX, writer="trainer"
    )
    assert POLICY.topic in catalogue()
    assert run_topic("weights") == POLICY.topic


@pytest.mark.parametrize("name", ["a", "0", "Draft", "critic-2", "a" * 64])
def test_each_name_has_a_topic_and_keys_of_its_own(name: str) -> None:
    stream = WeightStream(name)
    assert run_topic(stream.topic.name) == stream.topic
    assert stream.topic not in catalogue()
    assert split_key(f"{stream.prefix}{POINTER_KEY}") == (stream, POINTER_KEY)
    assert split_key(POINTER_KEY) == (POLICY, POINTER_KEY)


@pytest.mark.parametrize("name", ["weight-stream-", "weight-stream-a.b", "weights-a", "weight"])
def test_other_names_are_no_topics(name: str) -> None:
    assert run_topic(name) is None


def test_streams_share_a_store_and_nothing_in_it(store, bus: MemoryBus) -> None:
    read_or_create_identity(store, "run")
    publish_small(bus, store, "run", DRAFT, range(2))
    draft = keys(store)
    publish_small(bus, store, "run", CRITIC, [7])
    assert set(draft) < set(keys(store))
    assert listed_versions(store) == []
    assert believed_pointer(store) is None
    assert listed_versions(DRAFT.part(store)) == [Version(0, 1), Version(1, 1)]
    assert listed_versions(CRITIC.part(store)) == [Version(7, 1)]
    store.put("streams/notes/mine.txt", b"of the user")
    assert named_streams(store) == (CRITIC, DRAFT)
    assert run_streams(store) == (POLICY, CRITIC, DRAFT)


def test_a_stream_s_part_is_a_store_of_versions_by_itself(tmp_path, bus: MemoryBus) -> None:
    publish_small(bus, open_store(f"file:{tmp_path}"), "run", DRAFT, range(3))
    alone = open_store(f"file:{tmp_path}/streams/draft")
    assert believed_pointer(alone) == believed_pointer(DRAFT.part(open_store(f"file:{tmp_path}")))
    assert torch.equal(fetch_tensors(alone, Version(2, 1))[1]["weight"], small_tensors(2)["weight"])


def test_announcements_are_in_the_stream_s_topic_alone(bus: MemoryBus) -> None:
    before = bus.end("weights")
    publish_small(bus, MemoryStore(), "run", DRAFT, range(3))
    assert bus.end("weights") == before
    reader = TopicReader(bus, DRAFT.topic.name, from_begin(bus, DRAFT.topic.name))
    records = [received.record for received in reader.poll()]
    versions = [r.version for r in records if isinstance(r, WeightsAnnounced)]
    assert versions == [Version(2, 1)], "the newest of the term"


def test_each_writer_fences_the_earlier_ones_of_its_stream_alone(bus: MemoryBus) -> None:
    store = MemoryStore()
    first, other = (publish_small(bus, store, "run", s, [0]) for s in (DRAFT, CRITIC))
    second = publish_small(bus, store, "run", DRAFT, [1])
    assert (first.term, second.term, other.term) == (1, 2, 1)
    with pytest.raises(Fenced, match=r"streams/draft/weights/latest\.json carries term 2"):
        first.publish(2, small_tensors(2))
    other.publish(1, small_tensors(1))
    assert second.publish(2, small_tensors(2)) == Version(2, 2)
    assert believed_pointer(CRITIC.part(store)).version == Version(1, 1)  # pyright: ignore[reportOptionalMemberAccess]


def test_retention_keeps_what_a_reader_of_the_stream_has_pinned(bus: MemoryBus) -> None:
    store = MemoryStore()
    writer = publish_small(bus, store, "run", DRAFT, range(3))
    pins, others = VersionPins(DRAFT.part(store), "a"), VersionPins(store, "a")
    pins.set([Version(0, 1)])
    others.set([Version(2, 1)])
    for number in range(3, 9):
        writer.publish(number, small_tensors(number))
    writer.retain()
    kept = [version.number for version in listed_versions(DRAFT.part(store))]
    assert kept == [0, 6, 7, 8]
    pins.close()
    others.close()


def test_a_named_stream_passes_relays_by(bus: MemoryBus) -> None:
    """Relays know versions of the policy alone: those of a stream are never taken for them."""
    directory: Any = None
    store = MemoryStore()
    pushing = PushingStore(store, directory, 1 << 20)
    publish_small(bus, pushing, "run", DRAFT, range(2))
    assert fetch_tensors(DRAFT.part(store), Version(1, 1))[1].keys() == small_tensors(1).keys()
    assert {version_of(key) for key in keys(store)} == {None}


def test_the_number_of_streams_has_a_bound(bus: MemoryBus) -> None:
    store = MemoryStore()
    for number in range(STREAMS_MAX):
        store.put(f"streams/s{number}/weights/latest.json", b"{}")
    with pytest.raises(ConfigurationError, match="64 named weight streams"):
        publish_small(bus, store, "run", DRAFT, [0])
    store.delete("streams/s0/weights/latest.json")
    publish_small(bus, store, "run", DRAFT, [0])
    publish_small(bus, store, "run", DRAFT, [1])


def test_a_deleted_or_another_run_gets_no_stream(bus: MemoryBus) -> None:
    store = MemoryStore()
    read_or_create_identity(store, "run")
    with pytest.raises(ConfigurationError, match="holds the run 'run', not 'other'"):
        publish_small(bus, store, "other", DRAFT, [0])
    mark_deleted(store, "run")
    with pytest.raises(ConfigurationError, match="was deleted"):
        publish_small(bus, store, "run", DRAFT, [0])
    assert keys(store) == ["run.json"]
