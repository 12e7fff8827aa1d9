"""Following a log and metrics files as an observer: in order, bounded, and without writes."""

import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.errors import StoreError
from rollstream.look.monitor.feed import (
    TAIL_BYTES,
    JsonLinesTail,
    RunFeed,
    positions_since,
    tail_positions,
)
from rollstream.look.monitor.groups import NumberSet
from rollstream.look.monitor.observer import RunObserver
from rollstream.look.monitor.samples import RecentSamples
from rollstream.look.report.history import RunHistory
from rollstream.look.report.summary import summarise
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.bus import AppendEntry, Message
from rollstream.streams.connect import open_bus
from rollstream.streams.fence import ARCHIVE_GROUP, truncate
from rollstream.streams.records import Annotation, GroupClosed, Position, WeightsAnnounced
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus, MemoryStore
from tests.archive.archive_samples import RETAINED_MAX, append, large, retained_bytes
from tests.report.report_html import report_html
from tests.support import planted_states as planted
from tests.support.synthetic_run import GROUPS


@pytest.fixture
def bus() -> MemoryBus:
    made = MemoryBus(lambda: planted.NOW_S)
    made.create(catalogue())
    return made


# ---- an old run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [10, 37, 100])
def test_of_an_old_run_only_a_tail_is_read_and_what_is_open_is_right(run_folder, tail):
    state, bus = planted.plan().state(), open_bus(f"sqlite:{run_folder.path / 'bus'}")
    feed = RunFeed(LogView(bus, None, ""), run_folder.metrics, tail)
    while feed.follow(state, 0.0):
        pass
    bus.close()
    assert state.is_tail
    assert 0 < state.groups.endings["trained"] < 60 * GROUPS
    assert list(state.groups.open) == [60 * GROUPS + 1]
    assert state.steps[-1].step == 60


def test_no_group_stays_open_whose_end_was_truncated_from_the_ledger(run_folder, tmp_path):
    """The admissions are kept for longer than the ledger, whose takes the checkpoint covers."""
    shutil.copytree(run_folder.path / "bus", tmp_path / "bus")
    state, bus = planted.plan().state(), open_bus(f"sqlite:{tmp_path / 'bus'}")
    truncate(bus, "ledger", {0: Position(bus.end("ledger")[0] // 2)})
    feed = RunFeed(LogView(bus, None, ""), run_folder.metrics)
    while feed.follow(state, 0.0):
        pass
    bus.close()
    assert state.is_tail
    assert list(state.groups.open) == [60 * GROUPS + 1]


def test_a_reader_that_begins_in_the_middle_begins_at_the_asked_time(bus):
    clock = iter(range(1000, 2000))
    timed = MemoryBus(lambda: next(clock))
    timed.create(catalogue())
    for group in range(100):
        publish(timed, "partials", str(group), planted.finished(group, 0, 1.0))
    last = timed.read("partials", dict.fromkeys(range(4), 0), records_max=1000)
    found = positions_since(timed, "partials", 1050)
    later = [m for m in last if m.offset >= found[m.partition]]
    assert sorted(m.timestamp_ms for m in later) == [1000 * s for s in range(1050, 1100)]
    assert positions_since(timed, "partials", 9e9) == timed.end("partials")
    assert positions_since(timed, "partials", 0) == timed.begin("partials")
    assert (
        sum(timed.end("partials")[p] - at for p, at in tail_positions(timed, "partials", 8).items())
        == 8
    )


def test_invariant_7_an_onlooker_passes_over_what_a_zombie_writes(bus, tmp_path):
    old, new = (FencedWriter(bus, "ledger", "trainer", term) for term in (1, 2))
    old.open()
    old.append([("run", GroupClosed(1, "dead", "", 1))])
    new.open()
    old.append([("run", GroupClosed(2, "dead", "", 1))])
    new.append([("run", GroupClosed(3, "dead", "", 1))])
    state, feed = planted.plan().state(), RunFeed(LogView(bus, None, ""), tmp_path)
    while feed.follow(state, 0.0):
        pass
    assert state.groups.endings == {"dead": 2}
    assert state.restarts() == {"trainer": 1}


def test_a_lost_record_is_reported(bus, tmp_path):
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    writer.append([("run", GroupClosed(1, "dead", "", 1))])
    writer.append([("run", GroupClosed(2, "dead", "", 1))])
    values = [message.value for message in bus.read("ledger", {0: 0})]
    bus.append("admissions", [AppendEntry(b"run", values[n]) for n in (0, 2)])
    state, feed = planted.plan().state(), RunFeed(LogView(bus, None, ""), tmp_path)
    while feed.follow(state, 0.0):
        pass
    assert len(state.holes) == 1
    assert planted.kinds(state) == ["unreadable_parts"]


def test_a_position_that_was_truncated_away_continues_at_the_begin(bus, tmp_path):
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    for group in range(9):
        writer.append([("run", GroupClosed(group, "dead", "", 1))])
    state, feed = planted.plan().state(), RunFeed(LogView(bus, None, ""), tmp_path)
    feed.follow(state, 0.0)
    assert (state.groups.endings["dead"], state.is_tail) == (9, False)
    writer.append([("run", GroupClosed(group, "dead", "", 1)) for group in (9, 10)])
    bus.truncate("ledger", {0: 11})
    feed.follow(state, 0.0)
    assert (state.groups.endings["dead"], state.is_tail, state.holes) == (10, True, [])
    history = RunHistory(is_tail=state.is_tail)
    assert "without the run's first records" in report_html(history, summarise(history))


def test_an_archive_that_commits_is_measured(bus, tmp_path):
    for group in range(3):
        publish(bus, "trajectories", "1", planted.finished(group, 0, 1.0))
    state, feed = planted.plan().state(), RunFeed(LogView(bus, None, ""), tmp_path)
    feed.follow(state, 0.0)
    assert state.unarchived == {}
    (partition,) = (p for p, end in bus.end("trajectories").items() if end)
    bus.commit("archive", "trajectories", {partition: Position(1)})
    feed.follow(state, 100.0)
    assert state.unarchived["trajectories"].records == 2
    assert state.unarchived["trajectories"].oldest_s == pytest.approx(planted.NOW_S)


def test_topics_of_another_program_are_followed_beside_unknown_records(bus, tmp_path):
    bus.append("weights", [AppendEntry(b"run", b"rubbish")])
    writer = FencedWriter(bus, "weights", "trainer", 1)
    writer.open()
    writer.append([("run", planted.announced(3))])
    state, feed = planted.plan().state(), RunFeed(LogView(bus, None, ""), tmp_path)
    while feed.follow(state, 0.0):
        pass
    assert isinstance(state.weights, WeightsAnnounced)
    assert (state.weights.version.number, state.unreadable) == (3, 1)


# ---- metrics files and sets ----------------------------------------------------------------------


def test_lines_are_read_as_they_come_and_a_torn_one_waits(tmp_path):
    tail = JsonLinesTail(tmp_path / "eval.jsonl")
    assert tail.read() == []
    tail.path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    assert tail.read() == []
    with tail.path.open("a") as file:
        file.write('ep": 2}\nno json\n[3]\n{"step": 4}\n')
    assert tail.read() == [{"step": 2}, {"step": 4}]
    assert tail.broken == 2
    tail.path.write_text('{"step": 5}\n')
    assert tail.read() == [{"step": 5}]


def test_of_a_long_file_the_end_is_read(tmp_path):
    tail, line = JsonLinesTail(tmp_path / "x.jsonl"), '{"step": 1, "words": "%s"}\n' % ("x" * 973)
    tail.path.write_text(line * 1000)
    assert 0 < len(tail.read()) <= TAIL_BYTES // len(line)
    assert tail.broken == 0
    tail.path.write_text("x" * (2 * TAIL_BYTES))
    assert tail.read() == []


@given(st.lists(st.integers(0, 40)))
def test_a_number_set_is_a_set(numbers):
    found, expected = NumberSet(), set()
    for number in numbers:
        assert found.add(number) == (number not in expected)
        expected.add(number)
    assert {n for n in range(-1, 42) if n in found} == expected
    assert len(found) == len(expected)
    gaps = zip(found.held.ends, found.held.starts[1:], strict=False)
    assert all(end < start for end, start in gaps)


def test_a_view_that_is_behind_truncation_keeps_no_memory_of_the_archive(tmp_path):
    bus, store, topic = MemoryBus(lambda: planted.NOW_S), MemoryStore(), "annotations"
    bus.create(catalogue(1))
    view = LogView(bus, store, "tiny")
    observer = RunObserver(planted.plan(), tmp_path, lambda: view, lambda: planted.NOW_S)
    observer.observe()
    archive = TopicArchive(bus, store, "tiny", topic, ArchiveSettings(topics=(topic,)))
    archive.start()
    append(bus, topic, [large(number) for number in range(600)])
    archive.finish()
    truncate(bus, topic, bus.committed(ARCHIVE_GROUP, topic))
    retained_bytes()
    while observer.state.groups.annotations < 600:
        before = observer.state.groups.annotations
        observer.observe(catch_up_s=60.0)
        assert retained_bytes() < RETAINED_MAX
        assert observer.state.groups.annotations > before


def test_a_run_that_cannot_be_read_is_not_looked_at_again_at_once(tmp_path):
    def unreadable() -> LogView:
        raise StoreError("the disk is away")

    observer = RunObserver(planted.plan(), tmp_path, unreadable, lambda: planted.NOW_S)
    assert observer.is_behind
    assert "the disk is away" in observer.observe().trouble
    assert not observer.is_behind


class ResponseBus(MemoryBus):
    """Returns one record a read, as a broker returns one response."""

    def read(self, topic: str, positions: Mapping[int, int], **more: Any) -> list[Message]:
        return super().read(topic, positions, **{**more, "records_max": 1})


def test_a_refresh_reads_each_topic_to_its_end(tmp_path):
    bus = ResponseBus(lambda: planted.NOW_S)
    bus.create(catalogue(1))
    state, feed = planted.plan().state(), RunFeed(LogView(bus, None, ""), tmp_path)
    while feed.follow(state, 0.0):
        pass
    for number in range(20):
        publish(bus, "status", "rollout-0/1", planted.status("rollout-0", number))
    feed.follow(state, 0.0)
    assert state.rollouts["rollout-0"][-1].time_s == 19


class SlowStore(MemoryStore):
    """Takes a minute for each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = planted.NOW_S

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.now_s += 60.0
        return super().get(key, start, end)


def test_no_heartbeat_is_late_because_a_refresh_took_long(bus, tmp_path):
    store = SlowStore()
    view = LogView(bus, store, "tiny")
    observer = RunObserver(planted.plan(), tmp_path, lambda: view, lambda: store.now_s)
    observer.observe(catch_up_s=60.0)
    began_s = store.now_s
    publish(bus, "status", "rollout-0/1", planted.status("rollout-0", began_s))
    shown = observer.observe(catch_up_s=60.0)
    assert store.now_s > began_s
    assert [line.silent_s for line in shown.rollouts] == [0.0]


class AwayStore(MemoryStore):
    """Answers no read while it is away."""

    is_away = False

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if self.is_away:
            raise StoreError("SlowDown: reduce your rate")
        return super().get(key, start, end)


def test_while_the_store_is_away_the_log_is_shown_and_the_store_named_first(bus, tmp_path):
    store, now_s = AwayStore(), planted.NOW_S
    view = LogView(bus, store, "tiny")
    observer = RunObserver(planted.plan(), tmp_path, lambda: view, lambda: now_s)
    publish(bus, "status", "rollout-0/1", planted.status("rollout-0", now_s))
    store.is_away = True
    shown = observer.observe(catch_up_s=60.0)
    assert observer.has_read
    assert [line.name for line in shown.rollouts] == ["rollout-0"]
    assert shown.concerns[0].kind == "run_unreadable"
    assert "the run's store cannot be read: SlowDown" in shown.concerns[0].what
    store.is_away, now_s = False, now_s + 60
    assert not observer.observe(catch_up_s=60.0).trouble, "it is asked again"


def test_a_reward_annotation_counts_before_the_records_own_as_in_the_trainer():
    samples = RecentSamples()
    for index in range(2):
        record = planted.finished(1, index, 0.0)
        samples.finish(record)
        values = np.array([float(index)], np.float32)
        samples.annotate(Annotation(record.trajectory, 1, "reward", values, "scorer-0"))
    (task,) = samples.tasks(2).values()
    assert task.reward_mean == 0.5
