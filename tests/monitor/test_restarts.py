"""Restarts are counted from the terms of the log, so they are true under an orchestrator too."""

import re

import pytest

from rollstream.look.monitor.feed import RunFeed
from rollstream.look.monitor.sessions import RunSessions
from rollstream.look.monitor.snapshot import take_snapshot
from rollstream.look.monitor.state import RunState
from rollstream.look.report.summary import open_history, summarise
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.terms import STARTS
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Opened, RelayStatus
from rollstream.streams.writer import FencedWriter, publish
from tests.report.report_html import report_html
from tests.support import planted_states as planted
from tests.support.synthetic_run import admitted, publish_run, status


@pytest.fixture
def without_supervisor(tmp_path):
    """A run that an orchestrator started: the trainer thrice, a rollout twice, no events."""
    folder = publish_run(tmp_path / "run", steps=3)
    (folder.metrics / "supervisor.jsonl").unlink()
    bus = open_bus(f"sqlite:{folder.path / 'bus'}")
    for term in (2, 3):
        FencedWriter(bus, "ledger", "trainer", term).open()
    dispatch = FencedWriter(bus, "admissions", "dispatch", 2)
    dispatch.open()
    dispatch.append([("90", admitted(90))])
    publish(bus, "status", "rollout-0/1", status("rollout-0", 3))
    bus.close()
    return folder


EXPECTED = {"dispatch": 1, "rollout-1": 1, "trainer": 2}


def test_top_and_report_count_the_same_restarts(without_supervisor):
    bus = open_bus(f"sqlite:{without_supervisor.path / 'bus'}")
    for tail in (20_000, 4):
        state, feed = RunState(), RunFeed(LogView(bus, None, ""), without_supervisor.metrics, tail)
        while feed.follow(state, 0.0):
            pass
        assert state.restarts() == EXPECTED, tail
    bus.close()
    history = open_history(without_supervisor)
    assert history.state.restarts() == EXPECTED
    assert summarise(history).restarts == 4
    page = report_html(history, summarise(history))
    assert re.search(r'<td>trainer</td><td class="n"[^>]*>2</td>', page)
    assert "4 restarts" in planted.drawn(planted.moment(history.state), 100)
    assert "2× trainer" in planted.drawn(planted.moment(history.state), 100)


def test_a_role_without_terms_restarts_as_often_as_the_supervisor_recorded():
    state = RunState()
    for role in ("eval", "scorer-1", "trainer"):
        state.apply_event({"time_s": 1.0, "event": "death", "role": role, "code": 1})
    assert state.restarts() == {"eval": 1, "scorer-1": 1}
    state.apply(Opened("trainer", 2))
    assert state.restarts()["trainer"] == 1


def test_relays_share_a_sequence_of_terms_and_restart_each_by_itself():
    state = RunState()
    for relay, term in (("a", 1), ("b", 2), ("b", 2), ("b", 5), ("a", 1)):
        state.apply(RelayStatus(relay, term, "n", "http://x", (), "", 1.0))
    assert state.restarts() == {"b": 1}


def test_a_name_that_was_retired_and_returned_counts_its_own_restarts():
    state = RunState()
    for term in (STARTS + 1, STARTS + 3):
        state.apply(planted.status("rollout-7", term=term))
    assert state.restarts() == {"rollout-7": 2}


def test_the_term_that_made_a_fork_is_no_restart():
    state = RunState(is_fork=True)
    state.apply(Opened("trainer", 2))
    state.apply(Opened("prompts", 3))
    assert state.restarts() == {"prompts": 1}


def test_memory_of_terms_is_bounded():
    state = RunState()
    for number in range(9000):
        state.apply(planted.status(f"rollout-{number}", term=2))
    assert len(state.terms) == 8192


def _session(begin_s: float, end_s: float | None, ending: str = "stopped") -> list[dict]:
    roles = ("trainer", "rollout-0")
    lines = [{"time_s": begin_s, "event": "start", "role": r, "restart": 0} for r in roles]
    return [*lines, *([] if end_s is None else [{"time_s": end_s, "event": ending}])]


def test_a_start_is_no_restart_and_a_pause_between_sessions_is_no_time():
    state = planted.healthy()
    begin_s = planted.NOW_S - 1000.0
    for line in (*_session(begin_s, begin_s + 100), *_session(begin_s + 900, None)):
        state.apply_event(line)
    state.apply(Opened("trainer", 2), begin_s + 901)
    assert "trainer" not in state.restarts()
    assert planted.moment(state).elapsed_s == pytest.approx(200.0)
    state.apply_event({"time_s": begin_s + 950, "event": "death", "role": "trainer", "code": 1})
    state.apply_event({"time_s": begin_s + 951, "event": "start", "role": "trainer", "restart": 1})
    state.apply(Opened("trainer", 3), begin_s + 952)
    assert state.restarts()["trainer"] == 1
    state.apply_event({"time_s": begin_s + 960, "event": "complete"})
    assert planted.moment(state).elapsed_s == pytest.approx(160.0)


def test_the_clock_of_a_session_does_not_go_back_at_its_end():
    state, started_s = RunState(), 1000.0
    for line in _session(1001.0, 1101.0):
        state.apply_event(line)
    state.newest_s["status"] = 1040.0
    plan = planted.plan()
    shown = [
        take_snapshot(state, plan, now_s, (), started_s).elapsed_s for now_s in (1101.5, 1130.0)
    ]
    assert shown == [101.0, 101.0]
    for now_s, expected in ((5000.0, 100.0), (5030.0, 130.0)):
        assert take_snapshot(state, plan, now_s, (), 5000.0).elapsed_s == expected
    for line in _session(5001.0, None):
        state.apply_event(line)
    assert take_snapshot(state, plan, 5030.0, (), 5000.0).elapsed_s == 130.0


def test_a_killed_supervisor_left_no_ending_and_its_pause_begins_at_the_last_work():
    sessions = RunSessions()
    for line in (*_session(0.0, None), *_session(1000.0, 1100.0)):
        sessions.apply(line)
    assert sessions.run_s(0.0, 1100.0, worked_s=(200.0, 1050.0)) == 300.0
