"""Followed topics on a real broker: one consumer returns the same as cursors would."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rollstream.errors import PositionLost
from rollstream.producers.drafts.feed import TopicFollower
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.codec import encode
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Annotation
from rollstream.streams.topics import Topic
from testbed.servers import kafka_broker
from testbed.waiting import WAIT_S, let_pass


@pytest.fixture
def bus() -> Iterator[Bus]:
    bus = open_bus(kafka_broker.new_url())
    bus.create([Topic("a", 2), Topic("b"), Topic("c")])
    yield bus
    bus.close()


def look(bus: Bus, topic: str, at: dict[int, int], records_max: int = 512) -> list[bytes | None]:
    """One look of a loop, without waiting."""
    found = bus.read(topic, at, records_max=records_max, wait_s=0.05, exact=False)
    for message in found:
        at[message.partition] = message.offset + 1
    return [message.value for message in found]


def looked(bus: Bus, topic: str, at: dict[int, int], count: int) -> list[bytes | None]:
    """Looks until so many records came."""
    found: list[bytes | None] = []
    end = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < end:
        found += look(bus, topic, at)
    return found


def named(prefix: str, count: int) -> list[AppendEntry]:
    return [AppendEntry(b"k", f"{prefix}{n}".encode(), 0) for n in range(count)]


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


def test_topics_that_join_later_are_read_from_where_their_reader_is(bus: Bus):
    places = {"a": {0: 0, 1: 0}, "b": {0: 0}, "c": {0: 2}}
    for topic, at in places.items():
        bus.append(topic, named(topic, 5))
        wanted = [f"{topic}{n}".encode() for n in range(at[0], 5)]
        assert looked(bus, topic, at, len(wanted)) == wanted
    bus.append("a", named("x", 3))
    assert looked(bus, "a", places["a"], 3) == [b"x0", b"x1", b"x2"]


def test_a_reader_that_went_back_or_ahead_by_itself_gets_the_records_there(bus: Bus):
    bus.append("b", named("", 6))
    at = {0: 0}
    assert looked(bus, "b", at, 6) == [b"%d" % n for n in range(6)]
    assert looked(bus, "b", {0: 2}, 4) == [b"2", b"3", b"4", b"5"]
    bus.append("b", named("y", 4))
    ahead = {0: 8}  # an exact read took 6 and 7
    assert looked(bus, "b", ahead, 2) == [b"y2", b"y3"]


def test_two_readers_of_one_topic_both_get_everything_in_order(bus: Bus):
    found: dict[int, list[bytes | None]] = {}

    def follow(reader: int) -> None:
        found[reader] = looked(bus, "b", {0: 0}, 300)

    threads = [threading.Thread(target=follow, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for wave in range(30):
        bus.append("b", named(f"{wave}.", 10))
    for thread in threads:
        thread.join(WAIT_S)
    wanted = [f"{wave}.{n}".encode() for wave in range(30) for n in range(10)]
    assert found == {0: wanted, 1: wanted}


def test_a_slow_reader_gets_more_than_is_kept_ready_for_it(bus: Bus):
    """Invariant 8: a reader's waiting records are bounded, and none of them is lost."""
    at, big = {0: 0}, 700_000
    assert look(bus, "b", at) == []
    for n in range(40):  # 28 MB
        bus.append("b", [AppendEntry(b"k", n.to_bytes(4, "little") * (big // 4), 0)])
    found: list[int] = []
    end = time.monotonic() + WAIT_S
    while len(found) < 40 and time.monotonic() < end:
        found += [int.from_bytes((v or b"")[:4], "little") for v in look(bus, "b", at, 3)]
    assert found == list(range(40))


def test_exact_reads_beside_following_ones_agree(bus: Bus):
    at = {0: 0}
    for wave in range(10):
        bus.append("c", named(f"{wave}.", 3))
        wanted = [f"{wave}.{n}".encode() for n in range(3)]
        exact = values(bus.read("c", {0: 3 * wave}))
        assert exact == wanted[: len(exact)]
        assert looked(bus, "c", at, 3) == wanted


def restarts_and_lost_feeds(bus: Bus) -> tuple[object, object]:
    """Restarts of the consumer, and feeds that ended."""
    values = BusWrapper(bus).metric_values()
    return values.get("log_follow_restarts_total"), values.get("log_follow_lost_total")


def looked_until_lost(bus: Bus, topic: str, at: dict[int, int]) -> int:
    """Records that came before the position was found truncated."""
    count, end = 0, time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            count += len(look(bus, topic, at))
        except PositionLost:
            return count
    raise AssertionError(f"{topic}: no error reported that {at} is gone")


def test_a_position_truncated_before_it_is_followed_ends_the_feed_of_its_topic_alone(bus: Bus):
    c = {0: 0}
    bus.append("c", named("c", 3))
    assert looked(bus, "c", c, 3) == [b"c0", b"c1", b"c2"]
    bus.append("b", named("b", 6))
    bus.truncate("b", {0: 4})
    assert looked_until_lost(bus, "b", {0: 0}) == 0
    assert looked(bus, "b", {0: 4}, 2) == [b"b4", b"b5"]
    bus.append("c", named("x", 2))
    assert looked(bus, "c", c, 2) == [b"x0", b"x1"]
    assert restarts_and_lost_feeds(bus) == (0, 1)


def test_a_position_truncated_while_it_is_followed_is_reported_after_the_queue(bus: Bus):
    """Its feed was full, so the consumer stood still while the topic was truncated past it."""
    at, c, big = {0: 0}, {0: 0}, b"b" * 1_000_000
    assert look(bus, "b", at) == look(bus, "c", c) == []
    for _ in range(24):
        bus.append("b", [AppendEntry(b"k", big, 0)])
    let_pass(1.0)  # it fetches as much as fits; timing decides only how much that is
    bus.truncate("b", {0: 23})
    came = looked_until_lost(bus, "b", at)
    assert came == at[0] < 23
    assert len(looked(bus, "b", {0: 23}, 1)) == 1
    bus.append("c", named("c", 2))
    assert looked(bus, "c", c, 2) == [b"c0", b"c1"]
    assert restarts_and_lost_feeds(bus) == (0, 1)


def test_drafts_follow_from_the_new_begin_and_count_what_was_lost(bus: Bus):
    """Truncated between two looks of a busy rollout, as in a run that truncates `prompts`."""
    note = encode(Annotation("t", 0, "reward", np.ones(1, np.float32), "r"))
    bus.append("b", [AppendEntry(b"k", note, 0)] * 6)
    following = TopicFollower(bus, bus, "b", 100)
    bus.truncate("b", {0: 4})
    found, end = 0, time.monotonic() + WAIT_S
    while found < 2 and time.monotonic() < end:
        found += len(following.poll(32))
    assert (found, following.reader.lost, restarts_and_lost_feeds(bus)) == (2, 1, (0, 1))
