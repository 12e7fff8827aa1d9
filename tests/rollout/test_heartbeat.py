"""The heartbeat of a rollout whose loop is busy, fails or leaves."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollstream.errors import BusError
from rollstream.producers.rollout.heartbeat import Heartbeat, StatusRepeats
from rollstream.streams.bus import AppendEntry
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import RolloutStatus
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus
from testbed.waiting import WAIT_S, wait_for
from tests.dispatch.test_recovery import status
from tests.rollout.weights.following import Followed

EVERY_S = 0.005


@pytest.fixture
def bus() -> MemoryBus:
    """Without compaction, so that all sent records are there."""
    bus = MemoryBus()
    bus.create(catalogue(1))
    bus._clean = lambda topic, partitions, now_s: None  # type: ignore[method-assign]
    return bus


def sent(bus) -> list[RolloutStatus]:
    reader = TopicReader(bus, "status", from_begin(bus, "status"))
    records = [one.record for one in reader.read_to(bus.end("status"))]
    return [record for record in records if isinstance(record, RolloutStatus)]


def newest_sent(bus) -> RolloutStatus:
    """The log is compacted: of the records below an end, newer ones may have replaced all before
    they are read.
    """
    return wait_for(lambda: sent(bus))[-1]


def test_a_loop_that_turns_is_not_repeated_and_one_that_stands_is():
    repeats = StatusRepeats(every_s=0.5, iterated_s=100.0)
    assert repeats.wait_s(200.0) is None
    for now_s in (100.0, 100.6, 101.2):
        repeats.iterated_s = now_s
        repeats.note_sent(status("a", tokens_total=7), now_s)
        assert repeats.wait_s(now_s) == 1.0
    assert repeats.wait_s(102.2) == 0.0
    record = repeats.repeat(102.2, time_s=5.0)
    assert (record.time_s, record.tokens_total) == (5.0, 7)
    assert record.stalled_s == pytest.approx(1.0)
    assert repeats.wait_s(102.2) == 1.0
    assert repeats.repeat(132.2, time_s=35.0).stalled_s == pytest.approx(31.0)


def test_heartbeats_continue_while_the_engine_takes_weights(tmp_path: Path):
    followed = Followed(tmp_path)
    followed.publish()
    engine, go = followed.engine(), threading.Event()
    rollout = followed.rollout(engine)
    rollout.parts.publisher.heartbeat = Heartbeat(followed.bus, EVERY_S)
    update = engine.update

    def slow(*given) -> None:
        assert go.wait(WAIT_S)
        update(*given)

    engine.update = slow  # type: ignore[method-assign]
    stop, newest = threading.Event(), followed.publish()
    thread = threading.Thread(target=rollout.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: any(one.stalled_s > 10 * EVERY_S for one in sent(followed.bus)))
        assert newest_sent(followed.bus).version < newest
        go.set()
        wait_for(lambda: newest_sent(followed.bus).version == newest)
    finally:
        go.set()
        stop.set()
        thread.join(WAIT_S)
    last = newest_sent(followed.bus)
    assert (last.health, last.running, last.waiting) == ("leaving", 0, 0)
    assert not rollout.parts.publisher.heartbeat._thread.is_alive(), (
        "nothing follows the last status"
    )
    followed.close()


def test_statuses_are_sent_in_order_and_nothing_follows_the_last(bus: MemoryBus):
    heartbeat = Heartbeat(bus, EVERY_S)
    for number in range(40):
        heartbeat.note_iteration()
        heartbeat.send(status("a", tokens_total=number))
    heartbeat.end()
    found = sent(bus)
    assert [one.tokens_total for one in found] == sorted(one.tokens_total for one in found)
    assert (found[-1].tokens_total, found[-1].stalled_s) == (39, 0.0)
    assert not heartbeat._thread.is_alive()


def test_a_loop_that_failed_sends_no_more(tmp_path: Path):
    followed = Followed(tmp_path)
    followed.publish()
    rollout = followed.rollout(followed.engine())
    rollout.parts.publisher.heartbeat = Heartbeat(followed.bus, EVERY_S)

    def fails() -> list:
        raise BusError("its log is away")

    rollout.assignments.read = fails  # type: ignore[method-assign]
    with pytest.raises(BusError):
        rollout.run(threading.Event())
    rollout.parts.publisher.heartbeat._thread.join(WAIT_S)
    assert not rollout.parts.publisher.heartbeat._thread.is_alive()
    followed.close()


def test_what_fails_beside_the_loop_ends_the_loop():
    class Broken(MemoryBus):
        def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
            raise BusError("no answer")

    bus = Broken()
    bus.create(catalogue(1))
    heartbeat = Heartbeat(bus, EVERY_S)
    heartbeat.send(status("a"))
    heartbeat._thread.join(WAIT_S)
    with pytest.raises(BusError):
        heartbeat.send(status("a"))
