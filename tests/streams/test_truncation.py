"""Truncation keeps the fence (invariants 7 and 11), on every bus."""

import pytest

from rollstream.errors import PositionLost
from rollstream.streams.fence import (
    TRUNCATED_GROUP,
    earliest_positions,
    position_before,
    renew_truncated,
    truncate,
)
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Fence, GroupClosed, Position
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address
from rollstream.streams.writer import FencedWriter


def closed(group: int) -> GroupClosed:
    return GroupClosed(group, "filtered", "", 1)


def writer(bus, term: int) -> FencedWriter:
    opened = FencedWriter(bus, "ledger", "trainer", term)
    opened.open()
    return opened


def read(bus) -> list[int]:
    reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
    return [r.record.group for r in reader.read_to(bus.end("ledger"))]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def topics(bus):
    bus.create(catalogue())
    return bus


def test_a_zombies_record_stays_void_when_the_opening_that_fenced_it_is_gone(topics):
    bus = topics
    zombie = writer(bus, 2)
    living = writer(bus, 3)
    (first,) = living.append([("1", closed(1))])
    zombie.append([("9", closed(9))])
    living.append([("2", closed(2))])
    before = Position(first.offset + 1, Fence(3, 2))
    assert truncate(bus, "ledger", {0: before}) == {0: first.offset + 1}
    assert bus.begin("ledger") == {0: first.offset + 1}
    assert read(bus) == [2]


def test_a_crash_between_commit_and_truncation_loses_nothing_and_is_taken_up_again(topics):
    bus = topics
    living = writer(bus, 1)
    at = living.append([(str(n), closed(n)) for n in range(4)])
    bus.commit(TRUNCATED_GROUP, "ledger", {0: Position(at[2].offset, Fence(1, 3))})
    assert read(bus) == [2, 3]
    truncate(bus, "ledger", {0: position_before(bus, "ledger", at[2])})
    assert read(bus) == [2, 3]
    assert bus.begin("ledger") == {0: at[2].offset}


def test_truncation_only_goes_forwards(topics):
    bus = topics
    living = writer(bus, 1)
    at = living.append([(str(n), closed(n)) for n in range(4)])
    truncate(bus, "ledger", {0: position_before(bus, "ledger", at[3])})
    assert truncate(bus, "ledger", {0: Position(1, Fence(1, 1))}) == {}
    assert read(bus) == [3]
    with pytest.raises(PositionLost):
        position_before(bus, "ledger", Address(0, at[0].offset))


def test_the_last_record_stays(topics):
    bus = topics
    living = writer(bus, 1)
    living.append([("1", closed(1))])
    truncate(bus, "ledger", living.positions())
    assert bus.end("ledger")[0] - bus.begin("ledger")[0] == 1
    again = FencedWriter(bus, "ledger", "trainer", 2)
    again.open()
    again.append([("2", closed(2))])
    assert read(bus)[-1] == 2


def test_a_reader_without_a_position_stops_truncation():
    at = {0: Position(5), 1: Position(9)}
    assert earliest_positions([at, {0: Position(3)}]) == {0: Position(3)}
    assert earliest_positions([at, {}]) == {}
    assert earliest_positions([]) == {}


def test_records_of_many_writers_have_no_fence(topics):
    bus = topics
    dispatch = FencedWriter(bus, "admissions", "dispatch", 4)
    dispatch.open()
    (at,) = dispatch.append([("1", Admitted(1, 0, ("1.0",), 60.0, Address(0, 0)))])
    assert position_before(bus, "admissions", at) == Position(at.offset, Fence(4, 1))


def test_renewed_positions_keep_their_fence(topics):
    bus = topics
    renew_truncated(bus, "ledger")
    assert bus.committed(TRUNCATED_GROUP, "ledger") == {}
    living = writer(bus, 1)
    at = living.append([(str(n), closed(n)) for n in range(4)])
    truncate(bus, "ledger", {0: position_before(bus, "ledger", at[2])})
    before = bus.committed(TRUNCATED_GROUP, "ledger")
    renew_truncated(bus, "ledger")
    assert bus.committed(TRUNCATED_GROUP, "ledger") == before != {}
    assert read(bus) == [2, 3]
