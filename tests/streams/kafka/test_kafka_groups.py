"""Consumer groups in Kafka's own protocol: they spread partitions and lose nothing."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollstream.deadline import Deadline
from rollstream.errors import PositionLost
from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.kafka.address import Secrets, parse_kafka_url
from rollstream.streams.kafka.bus import KafkaBus
from rollstream.streams.kafka.group import KafkaGroupReader
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic
from testbed.servers.kafka_broker import new_url
from testbed.waiting import WAIT_S

EVERYTHING = [(partition, number) for partition in (0, 1) for number in range(3)]


@pytest.fixture
def url() -> str:
    return new_url()


@pytest.fixture
def filled(url: str) -> Iterator[Bus]:
    # Longer than a busy machine keeps a member from its heartbeat.
    bus = KafkaBus(parse_kafka_url(url), Secrets(), lease_s=30.0)
    bus.create([Topic("t", 2)])
    bus.append("t", [AppendEntry(b"k", b"%d" % number, p) for p, number in EVERYTHING])
    yield bus
    bus.close()


def poll_until(
    readers: list[GroupReader], enough: Callable[[list[list[Message]]], bool]
) -> list[list[Message]]:
    """The records of each reader, polled in turn."""
    got: list[list[Message]] = [[] for _ in readers]
    deadline = Deadline(WAIT_S)
    while not enough(got):
        assert not deadline.passed(), got
        for reader, messages in zip(readers, got, strict=True):
            messages += reader.poll(0.1)
    return got


def beside(act: Callable[[], None], other: GroupReader) -> None:
    """Acts while the other member reads: a rebalance ends only when all members take part."""
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        while not acting.done():
            other.poll(0.1)
        acting.result()


def offsets(messages: list[Message]) -> list[tuple[int, int]]:
    return sorted((m.partition, m.offset) for m in messages)


def test_one_member_reads_everything_from_the_begin(filled: Bus) -> None:
    reader = filled.join("g", "t", "one")
    (got,) = poll_until([reader], lambda got: len(got[0]) >= 6)
    assert offsets(got) == EVERYTHING
    reader.close()


def test_a_committed_record_is_not_delivered_again(filled: Bus) -> None:
    first = filled.join("g", "t", "one")
    poll_until([first], lambda got: len(got[0]) >= 6)
    first.commit()
    first.close()
    assert filled.committed("g", "t") == {0: Position(3), 1: Position(3)}
    filled.append("t", [AppendEntry(b"k", b"new", 1)])
    second = filled.join("g", "t", "two")
    (got,) = poll_until([second], lambda got: bool(got[0]))
    assert offsets(got) == [(1, 3)]
    second.close()


def test_a_commit_may_stay_below_an_offset(filled: Bus) -> None:
    first = filled.join("g", "t", "one")
    poll_until([first], lambda got: len(got[0]) >= 6)
    first.commit({0: 1, 1: 9})
    assert filled.committed("g", "t") == {0: Position(1), 1: Position(3)}
    first.commit()
    assert filled.committed("g", "t") == {0: Position(3), 1: Position(3)}
    first.close()


def test_partitions_move_to_a_member_that_joins(filled: Bus) -> None:
    one = filled.join("g", "t", "one")
    poll_until([one], lambda got: len(got[0]) >= 6)
    one.commit()
    two = filled.join("g", "t", "two")

    def each_has_some(got: list[list[Message]]) -> bool:
        filled.append("t", [AppendEntry(b"k", b"more", p) for p in (0, 1)])
        return all(got)

    got = poll_until([one, two], each_has_some)
    assert {m.partition for m in got[0]} | {m.partition for m in got[1]} == {0, 1}
    two.commit()
    beside(one.commit, two)
    moved = {m.partition for m in got[1]}
    assert len(moved) == 1
    beside(one.close, two)
    two.close()


def test_what_was_not_committed_goes_to_the_next_owner(filled: Bus) -> None:
    first = filled.join("g", "t", "one")
    poll_until([first], lambda got: len(got[0]) >= 6)
    first.close()
    second = filled.join("g", "t", "two")
    (got,) = poll_until([second], lambda got: len(got[0]) >= 6)
    assert offsets(got) == EVERYTHING
    second.close()


def test_a_member_whose_partitions_went_commits_nothing_of_them(url: str, filled: Bus) -> None:
    hasty = KafkaBus(parse_kafka_url(url), Secrets(), lease_s=1.5)
    slow = hasty.join("g", "t", "slow")
    poll_until([slow], lambda got: len(got[0]) >= 6)
    assert isinstance(slow, KafkaGroupReader)
    slow.drop_partitions([0, 1])  # the client's call when another member gets them
    slow.commit()
    assert filled.committed("g", "t") == {}
    slow.close()
    hasty.close()


def test_a_member_at_work_stays_one_without_reading(filled: Bus) -> None:
    busy = filled.join("g", "t", "busy")
    assert busy.poll(0, records_max=0) == []
    poll_until([busy], lambda got: len(got[0]) >= 6)
    filled.append("t", [AppendEntry(b"k", b"later", 0)])
    for _ in range(20):
        assert busy.poll(0, records_max=0) == []
    busy.commit()
    assert filled.committed("g", "t") == {0: Position(3), 1: Position(3)}
    (got,) = poll_until([busy], lambda got: bool(got[0]))
    assert offsets(got) == [(0, 3)]
    busy.close()


def test_a_group_behind_a_truncation_gets_an_error(filled: Bus) -> None:
    filled.commit("g", "t", {0: Position(0), 1: Position(0)})
    filled.truncate("t", {0: 2})
    reader = filled.join("g", "t", "one")
    with pytest.raises(PositionLost, match="t/0: offset 0 was truncated"):
        poll_until([reader], lambda got: len(got[0]) > 6)
    reader.close()


def test_groups_do_not_see_each_other(filled: Bus) -> None:
    readers = [filled.join("g", "t", "one"), filled.join("h", "t", "one")]
    got = poll_until(readers, lambda got: all(len(messages) >= 6 for messages in got))
    assert [offsets(messages) for messages in got] == [EVERYTHING, EVERYTHING]
    for reader in readers:
        reader.close()
