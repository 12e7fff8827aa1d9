"""Each rule of `storage/archive/run_rules.py` over a small log that is written to break it: the
index of the run and the views of `rollstream query` both follow it.
"""

import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings
from rollstream.look.figures.definitions import FIGURES
from rollstream.look.index.figures import RunTotals, outcomes, reasons, run_totals
from rollstream.look.index.index_reader import IndexReader
from rollstream.look.index.run_index import RunIndex
from rollstream.look.monitor.sessions import RunSessions
from rollstream.look.query.views import METRICS
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import encode
from rollstream.streams.fence import position_before, truncate
from rollstream.streams.records import (
    Admitted,
    Annotation,
    GroupClosed,
    Opened,
    Record,
    StepDone,
    Superseded,
    Take,
    Trajectory,
)
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Address, GroupMembers, Member, Span, Turn, Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryStore
from tests.index.indexed_records import RUN, RunViews, log_of, read_index

BEGUN_S = 1_700_000_000.0


@dataclass(frozen=True)
class AskedRun:
    """One log, read by the index and by the views."""

    index: RunIndex
    views: RunViews

    def both(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query that index and views answer alike."""
        rows = self.index.cursor().execute(sql).fetchall()
        assert self.views.rows(sql) == rows
        return rows


@contextmanager
def reading(view: LogView, max_lag: int | None, by_part: bool) -> Generator[AskedRun]:
    with (
        read_index(view, max_lag, by_part) as index,
        closing(RunViews(view, max_lag, by_part)) as views,
    ):
        yield AskedRun(index, views)


@contextmanager
def asked(*records: Record, max_lag: int | None = None, by_part: bool = False):
    with reading(LogView(log_of(records), None, RUN), max_lag, by_part) as run:
        yield run


def admitted(group: int, names: int = 2) -> Admitted:
    trajectories = tuple(f"{group}.{index}" for index in range(names))
    return Admitted(group, group, trajectories, 60.0, Address(0, group))


def finished(
    group: int, index: int, versions: tuple[int, ...] = (0,), tokens: int = 4, **changes: Any
) -> Trajectory:
    """As many spans of `tokens` tokens as versions."""
    count = tokens * len(versions)
    spans = tuple(
        Span(at * tokens, (at + 1) * tokens, Version(number, 1))
        for at, number in enumerate(versions)
    )
    record = Trajectory(
        f"{group}.{index}", group, index, 1, "t", "rollout-0", 1, np.zeros(count + 2, np.uint32),
        np.array([0, 0] + [1] * count, np.uint8), np.zeros(count, np.float32), spans, "stop", 1.0,
        Version(max(versions, default=0), 1), BEGUN_S + 1, BEGUN_S + 5,
    )  # fmt: skip
    return replace(record, **changes)


def taken(step: int, group: int, offsets: tuple[int, ...] = (0, 1), micro_batch: int = 0) -> Take:
    members = tuple(Member(f"{group}.{n}", Address(0, o), "h") for n, o in enumerate(offsets))
    return Take(step, 0, micro_batch, members, (GroupMembers(group, members),))


def done(step: int, term: int = 1, at_s: float = 10.0, **metrics: float) -> StepDone:
    return StepDone(step, Version(step, term), "h", 1, metrics, {}, BEGUN_S + at_s)


def dead(group: int, index: int) -> Trajectory:
    return finished(
        group,
        index,
        (),
        finish="dead",
        reward=None,
        reason="no room",
        trainer_version=Version(0, 1),
    )


ENDED = 'SELECT "group", ended, step FROM {} WHERE ended != \'open\' ORDER BY "group"'


def ends(run: AskedRun) -> list[tuple[Any, ...]]:
    rows = run.index.cursor().execute(ENDED.format("ended")).fetchall()
    assert run.views.rows(ENDED.format("groups")) == rows
    return rows


def trained(run: AskedRun) -> list[tuple[Any, ...]]:
    sql = "SELECT trajectory, step FROM {} WHERE step IS NOT NULL ORDER BY ALL"
    rows = run.index.cursor().execute(sql.format("t")).fetchall()
    assert run.views.rows(sql.format("trained")) == rows
    return rows


def rewards(run: AskedRun) -> list[tuple[Any, ...]]:
    sql = "SELECT trajectory, reward, tokens, version FROM {} ORDER BY trajectory"
    rows = run.index.cursor().execute(sql.format("t")).fetchall()
    assert run.views.rows(sql.format("rewards")) == rows
    return rows


def test_the_first_completion_counts_whatever_its_attempt():
    first = finished(0, 0, attempt=2, reward=0.5)
    again = finished(0, 0, tokens=9, reward=1.0)
    with asked(admitted(0), first, again, again, dead(0, 1), finished(0, 1)) as run:
        assert rewards(run) == [("0.0", 0.5, 4, 0), ("0.1", None, 0, None)]


def test_a_completion_outside_the_partition_of_its_group_does_not_count():
    bus = log_of([admitted(0), finished(0, 0)], partitions=2)
    wrong = AppendEntry(b"0", encode(finished(0, 1)), 1 - partition_of(b"0", 2))
    bus.append("trajectories", [wrong])
    with reading(LogView(bus, None, RUN), None, False) as run:
        assert [name for name, *_ in rewards(run)] == ["0.0"]


def test_bytes_that_are_no_record_and_records_of_a_fenced_writer_do_not_count():
    bus = log_of([admitted(0), finished(0, 0), taken(1, 0, (0,))])
    bus.append("trajectories", [AppendEntry(b"0", b"no record", 0)])
    repeated = bus.read("ledger", {0: 1})[0]
    bus.append("ledger", [AppendEntry(b"run", repeated.value, 0)])
    with reading(LogView(bus, None, RUN), None, False) as run:
        assert len(rewards(run)) == len(trained(run)) == 1
        assert run.index.value("SELECT count(*) FROM takes") == 1


def test_a_superseded_take_trains_nothing_and_ends_no_poisoned_group():
    """Group 0 is poisoned and closed, 1 poisoned only, 2 goes on in the next take of its step."""
    whole = [finished(group, index) for group in range(3) for index in range(2)]
    together = tuple(
        GroupMembers(g, tuple(Member(f"{g}.{i}", Address(0, 2 * g + i), "h") for i in range(2)))
        for g in range(3)
    )
    void = Take(1, 0, 0, tuple(m for g in together for m in g.members), together)
    again = Take(1, 0, 1, together[2].members, ())
    records = [*map(admitted, range(3)), *whole, void, Superseded(1, 0, (0,), (0, 1), "nan"), again]
    closing_0 = GroupClosed(0, "dead", "poisoned: nan", 1)
    with asked(*records, closing_0, done(1)) as run:
        assert trained(run) == [("2.0", 1), ("2.1", 1)]
        assert ends(run) == [(0, "dead", 1), (2, "trained", 1)]
        expected = {"admitted": 3, "trained": 1, "filtered": 0, "expired": 0, "dead": 1, "open": 1}
        assert outcomes(run.index) == expected
        assert reasons(run.index, 9) == [{"what": "dead: poisoned: nan", "count": 1}]


def test_a_take_that_is_superseded_in_a_later_reading_is_untrained_again():
    bus = log_of([admitted(0), finished(0, 0), finished(0, 1), taken(1, 0)])
    view, index = LogView(bus, None, RUN), RunIndex()
    with index:
        reader = IndexReader(view, index)
        reader.refresh()
        assert index.value("SELECT count(*) FROM t WHERE step = 1") == 2
        assert outcomes(index)["trained"] == 1
        writer = FencedWriter(bus, "ledger", "trainer", 2)
        writer.open()
        writer.append([("run", Superseded(1, 0, (0,), (0,), "nan"))])
        reader.refresh()
        assert index.value("SELECT count(*) FROM t WHERE step = 1") == 0
        assert outcomes(index)["trained"] == 0


@pytest.mark.parametrize("first", ["trained", "expired"])
def test_of_two_ends_of_a_group_the_first_counts(first: str):
    two = [taken(1, 0), GroupClosed(0, "expired", "deadline", 2)]
    order = two if first == "trained" else two[::-1]
    with asked(admitted(0), admitted(0), finished(0, 0), finished(0, 1), *order) as run:
        assert ends(run) == [(0, first, 1 if first == "trained" else 2)]
        assert outcomes(run.index)["admitted"] == 1


def test_a_resumed_trajectory_has_the_lag_of_each_of_its_versions():
    resumed = finished(0, 0, (1, 3), attempt=2, moves=1)
    with asked(admitted(0), resumed, finished(0, 1, (3,)), taken(5, 0)) as run:
        assert run.both("SELECT step, lag, tokens, trajectories FROM lag ORDER BY lag") == [
            (5, 1, 8, 2), (5, 3, 4, 1),
        ]  # fmt: skip


def test_tokens_above_max_lag_and_of_abandoned_turns_are_not_trained():
    turns = tuple(
        Turn("d", "h", 2 + 4 * at, 2 + 4 * at, 6 + 4 * at, "stop", 0.5, 1.0) for at in range(2)
    )
    left = finished(0, 0, (4, 4), turns=turns, abandoned=(0,))
    with asked(admitted(0), left, finished(0, 1, (1, 4)), taken(5, 0), max_lag=2) as run:
        assert run.both("SELECT step, lag, tokens, trajectories FROM lag") == [(5, 0, 8, 2)]
        assert run.index.value("SELECT waiting_s FROM t WHERE trajectory = '0.0'") == 1.0


def test_a_lag_below_0_counts_as_0_as_after_a_fork():
    ahead = finished(0, 0, (7,), trainer_version=Version(5, 1))
    with asked(admitted(0), ahead, finished(0, 1, (2,)), taken(4, 0)) as run:
        assert run.both("SELECT lag, tokens FROM lag ORDER BY lag") == [(0, 4), (1, 4)]
        spans = "SELECT lag_finish, lag_consumed FROM spans WHERE trajectory = '0.0'"
        assert run.views.rows(spans) == [(0, 0)]


def test_an_untrained_trajectory_has_no_lag_when_trained():
    with asked(admitted(0), finished(0, 0)) as run:
        assert run.both("SELECT * FROM lag") == []
        assert run.views.rows("SELECT lag_consumed, masked FROM spans") == [(None, None)]


def test_of_a_step_that_was_repeated_after_a_kill_the_newest_record_counts():
    """The pause between the two sessions is no time of the run."""

    def step(number: int, term: int, at_s: float, tokens: float, mean: float, most: float):
        lags = {"lag_consumed_mean": mean, "lag_consumed_max": most}
        return done(number, term, at_s, tokens_trained=tokens, **lags)

    records = [
        admitted(0), finished(0, 0), taken(1, 0, (0,)), step(1, 1, 10.0, 50.0, 3.0, 9.0),
        Opened("trainer", 2), step(1, 2, 110.0, 40.0, 1.0, 2.0), step(2, 2, 121.0, 60.0, 2.0, 4.0),
    ]  # fmt: skip
    sessions = RunSessions()
    for event, at_s in (("start", -3), ("stopped", 11), ("start", 101)):
        sessions.apply({"event": event, "role": "trainer", "time_s": BEGUN_S + at_s})
    with asked(*records) as run:
        assert run.both("SELECT step, term, version FROM steps ORDER BY step") == [
            (1, 2, 1), (2, 2, 2),
        ]  # fmt: skip
        figures = run_totals(run.index, sessions)
        assert (figures.step, figures.tokens_trained, figures.seconds) == (2, 100, 30.0)
        assert figures.tokens_per_s == pytest.approx(100 / 30)
        assert (figures.lag_consumed_mean, figures.lag_consumed_max) == (1.5, 4.0)


def test_the_seconds_of_a_run_are_those_between_its_first_and_last_work():
    with asked(finished(0, 0), done(1, at_s=8.0)) as run:
        assert run_totals(run.index, RunSessions()).seconds == 7.0
    with asked() as run:
        assert run_totals(run.index, RunSessions()) == RunTotals()


def note(values: list[float], reason: str = "", name: str = "reward") -> Annotation:
    return Annotation("0.0", 0, name, np.array(values, np.float32), "judge", reason)


@pytest.mark.parametrize(("by_part", "expected"), [(False, 0.25), (True, 1.0)])
def test_the_first_annotation_with_sound_numbers_is_the_reward(by_part: bool, expected: float):
    notes = [note([]), note([float("nan")]), note([0.25, 0.75]), note([9.0])]
    with asked(admitted(0), finished(0, 0), *notes, by_part=by_part) as run:
        assert [reward for _, reward, *_ in rewards(run)] == [expected]


def test_an_annotation_that_gave_up_leaves_the_reward_of_the_record():
    with asked(note([], "timeout"), note([0.5]), finished(0, 0, reward=0.75)) as run:
        assert [reward for _, reward, *_ in rewards(run)] == [0.75]
        (score,) = run.views.rows("SELECT value, reason FROM scores")
        assert score == (None, "timeout")


def everything(index: RunIndex) -> dict[str, list[tuple[Any, ...]]]:
    tables = ("t", "admitted", "ended", "members", "takes", "steps", "noted", "served", "lag")
    return {
        name: sorted(index.cursor().execute(f"FROM {name}").fetchall(), key=repr)
        for name in tables
    }  # fmt: skip


def archive(bus: Bus, store: MemoryStore) -> None:
    stop = threading.Event()
    stop.set()
    ArchiveService(bus, store, RUN, ArchiveSettings()).run(stop)


def test_what_archive_and_log_both_hold_counts_once():
    records = [
        *map(admitted, range(2)), *(finished(g, i) for g in range(2) for i in range(2)),
        note([0.5]), taken(1, 0), done(1), GroupClosed(1, "filtered", "", 1), dead(1, 0),
    ]  # fmt: skip
    bus, store = log_of(records), MemoryStore()
    with reading(LogView(bus, None, RUN), 4, False) as run:
        before = everything(run.index)
    archive(bus, store)
    view = LogView(bus, store, RUN)
    with reading(view, 4, False) as run:
        assert everything(run.index) == before
    for topic in ("ledger", "trajectories"):
        end = bus.end(topic)[0]
        truncate(bus, topic, {0: position_before(bus, topic, Address(0, end - 1))})
    assert bus.begin("ledger")[0] > 0
    for view in (LogView(bus, store, RUN), LogView(None, store, RUN)):
        with reading(view, 4, False) as run:
            assert everything(run.index) == before


def test_every_figure_has_a_definition():
    names = {field.name for field in fields(RunTotals)} - {"first_s", "last_s", "step"}
    assert {f"run.{name}" for name in names} <= FIGURES.keys()
    assert {f"step.{name}" for name in METRICS} <= FIGURES.keys()
