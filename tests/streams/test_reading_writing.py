"""Roles on a bus: one writer at a time counts (invariant 7), and every reader gets the same
records.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from rollstream.errors import BusError, BusTimeout, PositionLost, RecordTooLarge, SequenceGap
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import Envelope, encode, record_hash
from rollstream.streams.reader import TopicReader, from_begin, from_end, read_all_at, read_at
from rollstream.streams.records import (
    Annotation,
    Fence,
    GroupClosed,
    Opened,
    Position,
    Record,
    WeightsAnnounced,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import FencedWriter, publish, publish_all
from testbed.memory import MemoryBus
from testbed.sample_records import SAMPLES, trajectory
from tests.streams.record_equality import differences


@pytest.fixture
def run(bus: Bus) -> Bus:
    bus.create(catalogue())
    return bus


def closed(group: int) -> GroupClosed:
    return GroupClosed(group, "expired", "", 1)


def announced(number: int) -> WeightsAnnounced:
    return WeightsAnnounced("run", Version(number, 1), "m", "h", "anchor", None, 1, 0.0)


def groups(records: Sequence[Record]) -> list[int]:
    return [record.group for record in records if isinstance(record, GroupClosed)]


def read_groups(bus: Bus) -> list[int]:
    reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
    return groups([received.record for received in reader.read_to(bus.end("ledger"))])


class LosesAcknowledgements:
    """A bus whose appends succeed, but of which the first `lost` are reported as timed out."""

    def __init__(self, bus: Bus, lost: int) -> None:
        self.bus, self.lost = bus, lost

    def __getattr__(self, name: str) -> object:
        return getattr(self.bus, name)

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        offsets = self.bus.append(topic, entries)
        if self.lost:
            self.lost -= 1
            raise BusTimeout("no acknowledgement came")
        return offsets


def test_published_records_are_received_with_all_that_is_known_of_them(run: Bus) -> None:
    at = publish(run, "trajectories", "7", trajectory(8))
    (received,) = TopicReader(run, "trajectories", from_begin(run, "trajectories")).poll()
    assert differences(received.record, trajectory(8)) == []
    assert (received.topic, received.address, received.key) == ("trajectories", at, "7")
    assert received.hash == record_hash(encode(trajectory(8)))
    assert received.envelope is None
    assert differences(read_at(run, "trajectories", at).record, trajectory(8)) == []


def test_a_batch_is_published_in_order_to_keys_and_named_partitions(run: Bus) -> None:
    batch = [("7", trajectory(4)), ("7", trajectory(5)), ("7", trajectory(6), 3)]
    addresses = publish_all(run, "trajectories", batch)
    assert addresses[1] == Address(addresses[0].partition, addresses[0].offset + 1)
    assert addresses[2].partition == 3


def test_a_reader_continues_from_its_positions(run: Bus) -> None:
    ledger = FencedWriter(run, "ledger", "trainer", 1)
    ledger.open()
    ledger.append([("run", closed(1)), ("run", closed(2))])
    reader = TopicReader(run, "ledger", from_begin(run, "ledger"))
    assert groups([r.record for r in reader.poll(records_max=2)]) == [1]
    assert reader.positions == {0: Position(2, Fence(1, 2))}
    again = TopicReader(run, "ledger", reader.positions)
    assert groups([r.record for r in again.poll()]) == [2]
    assert again.positions == ledger.positions() == {0: Position(3, Fence(1, 3))}


def test_a_zombie_is_void_for_every_reader(run: Bus) -> None:
    zombie = FencedWriter(run, "ledger", "trainer", 1)
    zombie.open()
    zombie.append([("run", closed(1))])
    successor = FencedWriter(run, "ledger", "trainer", 2)
    assert successor.open() == {0: 2}
    zombie.append([("run", closed(666))])
    successor.append([("run", closed(2))])
    reader = TopicReader(run, "ledger", from_begin(run, "ledger"))
    assert groups([r.record for r in reader.poll()]) == [1, 2]
    assert reader.void == 1
    assert reader.poll() == []


def test_a_batch_in_doubt_is_sent_again_and_counts_once(run: Bus) -> None:
    faulty = LosesAcknowledgements(run, 2)
    writer = FencedWriter(faulty, "ledger", "trainer", 1)  # type: ignore[arg-type]
    writer.open()
    faulty.lost = 1
    writer.append([("run", closed(1)), ("run", closed(2))])
    writer.append([("run", closed(3))])
    assert read_groups(run) == [1, 2, 3]
    assert run.end("ledger") == {0: 3 + 4 + 1}


def test_a_writer_whose_batch_stays_in_doubt_is_broken(run: Bus) -> None:
    faulty = LosesAcknowledgements(run, 0)
    writer = FencedWriter(faulty, "ledger", "trainer", 1, retry_s=0.0)  # type: ignore[arg-type]
    writer.open()
    faulty.lost = 1
    with pytest.raises(BusTimeout):
        writer.append([("run", closed(1))])
    with pytest.raises(BusError, match="open a new term"):
        writer.append([("run", closed(2))])


def test_a_refused_record_uses_no_sequence_number(run: Bus) -> None:
    writer = FencedWriter(run, "weights", "trainer", 1)
    writer.open()
    huge = Annotation("t", 1, "values", np.zeros(1 << 20, np.float32), "s")
    with pytest.raises(RecordTooLarge):
        writer.append([("run", huge)])
    writer.append([("run", announced(1))])
    reader = TopicReader(run, "weights", from_begin(run, "weights"))
    assert len(reader.poll()) == 1


def test_a_hole_in_the_log_stops_the_reader(run: Bus) -> None:
    writer = FencedWriter(run, "ledger", "trainer", 1)
    writer.open()
    run.append("ledger", [AppendEntry(b"run", encode(closed(9), Envelope("trainer", 1, 5)))])
    reader = TopicReader(run, "ledger", from_begin(run, "ledger"))
    with pytest.raises(SequenceGap):
        reader.poll()
    assert reader.positions == from_begin(run, "ledger")


def test_opened_is_returned_only_on_request(run: Bus) -> None:
    FencedWriter(run, "assignments", "dispatch", 4).open()
    begin = from_begin(run, "assignments")
    assert TopicReader(run, "assignments", begin).poll() == []
    seen = TopicReader(run, "assignments", begin, with_opened=True).poll()
    assert len(seen) == run.partitions("assignments")
    assert {type(received.record) for received in seen} == {Opened}


def test_in_compacted_topics_the_key_carries_the_term(run: Bus) -> None:
    for term in (1, 2):
        writer = FencedWriter(run, "weights", "trainer", term)
        writer.open()
        for number in range(3):
            writer.append([("run", announced(number))])
    reader = TopicReader(run, "weights", from_begin(run, "weights"), with_opened=True)
    newest = {received.key: received.record for received in reader.poll()}
    assert {"run/1", "run/2", "opened/trainer/1", "opened/trainer/2"} == set(newest)


def test_a_truncated_fenced_topic_can_be_read_from_its_begin(run: Bus) -> None:
    writer = FencedWriter(run, "ledger", "trainer", 1)
    writer.open()
    writer.append([("run", closed(number)) for number in range(5)])
    run.truncate("ledger", {0: 3})
    assert read_groups(run) == [2, 3, 4]


def test_a_stray_record_without_envelope_is_no_record(run: Bus) -> None:
    FencedWriter(run, "ledger", "trainer", 1).open()
    publish(run, "ledger", "run", closed(666))
    assert read_groups(run) == []


def test_read_to_stops_at_the_ends_that_it_was_given(run: Bus) -> None:
    for length in range(6):
        publish(run, "trajectories", "7", trajectory(length), length % 2)
    reader = TopicReader(run, "trajectories", from_begin(run, "trajectories"))
    assert len(reader.read_to({0: 2, 1: 1})) == 3
    assert [reader.positions[p].offset for p in range(4)] == [2, 1, 0, 0]
    with pytest.raises(BusError, match="ends before"):
        reader.read_to({0: 99})


def test_no_partition_waits_behind_a_full_one(run: Bus) -> None:
    for partition in range(4):
        publish_all(run, "trajectories", [("7", trajectory(4), partition)] * 10)
    reader = TopicReader(run, "trajectories", from_begin(run, "trajectories"))
    partitions = {r.address.partition for _ in range(4) for r in reader.poll(records_max=5)}
    assert partitions == {0, 1, 2, 3}


def test_from_end_reads_only_what_comes_later(run: Bus) -> None:
    publish(run, "applied", "r", SAMPLES[10])
    reader = TopicReader(run, "applied", from_end(run, "applied"))
    later = publish(run, "applied", "r", SAMPLES[10])
    assert [received.address for received in reader.poll()] == [later]


def test_a_record_of_another_topic_is_no_record(embedded_bus: Bus) -> None:
    """Invariant 12: a foreign `Admitted` in `partials` must not be taken for dispatch's own."""
    run = embedded_bus
    run.create(catalogue())
    for topic in ("partials", "status", "trajectories", "annotations", "applied"):
        reader = TopicReader(run, topic, from_begin(run, topic))
        publish(run, topic, "7", SAMPLES[2])
        assert not reader.poll()
        assert reader.dead == 1


def test_an_address_that_is_gone_is_a_lost_position(embedded_bus: Bus) -> None:
    run = embedded_bus
    run.create(catalogue())
    for _ in range(3):
        publish(run, "status", "r", SAMPLES[5])
    with pytest.raises(PositionLost, match="compacted away"):
        read_at(run, "status", Address(0, 0))


def test_adjacent_addresses_are_read_in_one_batch() -> None:
    """A group of 16 members took 16 reads, each a seek and an answer of 4 MiB on Kafka."""
    reads: list[int] = []

    class Counting(MemoryBus):
        def read(self, topic, positions, **how):  # type: ignore[no-untyped-def]
            reads.append(how["records_max"])
            return super().read(topic, positions, **how)

    bus = Counting()
    bus.create(catalogue())
    at = [publish(bus, "trajectories", "7", trajectory(n), 0) for n in range(600)]
    wanted = [at[9], at[2], at[599], at[9]]
    found = read_all_at(bus, "trajectories", wanted)
    assert [received.address for received in found] == wanted
    assert reads == [8, 1]
    with pytest.raises(PositionLost):
        read_all_at(bus, "trajectories", [at[1], Address(0, 600)])
