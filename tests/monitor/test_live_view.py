"""The state and the display of an observer: a fold over records, metrics of a moment, a frame that
fits.
"""

import io
import random
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from rollstream.look.monitor.feed import RunFeed
from rollstream.look.monitor.observer import RunObserver
from rollstream.look.monitor.snapshot import (
    RunSettings,
    RunSnapshot,
    run_settings_of,
    take_snapshot,
)
from rollstream.look.monitor.state import RunState
from rollstream.look.monitor.view import LiveView
from rollstream.run.config.config import load
from rollstream.run.supervisor.supervisor import RoleState
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GroupClosed, Superseded
from tests.support import planted_states as planted
from tests.support.planted_states import drawn
from tests.support.synthetic_run import (
    GROUPS,
    STARTED_S,
    STEP_S,
    admitted,
    announced,
    done,
    status,
    take,
)

NOW_S = STARTED_S + 61 * STEP_S
NBSP = "\N{NO-BREAK SPACE}"


@pytest.fixture
def plan(run_folder) -> RunSettings:
    return replace(
        run_settings_of(load(run_folder.configuration)), steps=90, groups_per_step=GROUPS
    )


@pytest.fixture
def state(run_folder, plan) -> RunState:
    followed, bus = plan.state(), open_bus(f"sqlite:{run_folder.path / 'bus'}")
    feed = RunFeed(LogView(bus, None, ""), run_folder.metrics)
    while feed.follow(followed, NOW_S):
        pass
    bus.close()
    followed.newest_s = {"ledger": NOW_S - 1.5}  # the bus stamped all of it just now
    followed.began_s = STARTED_S
    return followed


@pytest.fixture
def shown(state, plan) -> RunSnapshot:
    return take_snapshot(state, plan, NOW_S)


# ---- state ---------------------------------------------------------------------------------------


def test_the_view_of_a_run_has_its_figures(shown):
    assert (shown.step, shown.steps, shown.phase) == (60, 90, "training")
    assert shown.outcomes.groups == {"trained": 60 * GROUPS, "dead": 1}
    assert (shown.queue.open_groups, shown.queue.ready_groups) == (1, 0)
    assert shown.evaluation is not None
    assert shown.evaluation["step"] == 60
    assert shown.version == 60
    assert shown.pace.left_s == pytest.approx(30 * STEP_S - STEP_S)
    assert [line.name for line in shown.rollouts] == ["rollout-0", "rollout-1"]
    assert shown.restarts == 1
    assert shown.lag.finish == {0: sum(shown.lag.finish.values())}


def test_a_group_is_ready_when_all_its_trajectories_finished():
    state = planted.plan().state()
    state.apply(planted.admitted(7), 1.0)
    for index in range(planted.SAMPLES):
        assert state.groups.ready() == 0, index
        for _ in range(2):  # delivery is at least once
            state.apply(planted.finished(7, index, 0.0), 2.0 + index)
    assert state.groups.ready() == 1
    assert state.groups.open[7].ready_s == 1.0 + planted.SAMPLES


def test_a_group_that_ended_is_not_open_in_whatever_order_topics_are_read():
    records = [
        admitted(0),
        admitted(4),
        take(1, range(4)),
        GroupClosed(4, "expired", "", 1),
        done(1),
    ]
    for seed in range(20):
        random.Random(seed).shuffle(records)
        state = RunState()
        for record in [*records, *records]:
            state.apply(record)
        assert state.groups.open == {}
        assert state.groups.endings == {"trained": 4, "expired": 1}
        assert [step.step for step in state.steps] == [1]


def test_the_groups_of_a_superseded_take_are_dead_and_counted_once():
    why = "the learner failed 3 times on it"
    records = [
        *map(admitted, range(4)),
        take(1, range(4)),
        Superseded(1, 0, (0,), (2,), why),
        GroupClosed(2, "dead", f"poisoned: {why}", 1),
        done(1),
    ]
    state = planted.plan().state()
    for record in [*records, *records]:
        state.apply(record, NOW_S)
    assert state.groups.endings == {"trained": 3, "dead": 1}
    assert "3 trained · 1 dead" in planted.drawn(planted.moment(state), 160)


def test_a_superseded_take_that_was_not_read_leaves_the_closing_to_count():
    """`top` of a long run starts in the middle of the ledger."""
    state = RunState()
    for record in (Superseded(1, 0, (0,), (2,), ""), GroupClosed(2, "dead", "poisoned: ", 1)):
        state.apply(record)
    assert state.groups.endings == {"dead": 1}


def test_invariant_2_late_and_second_completions_are_counted():
    state = planted.plan().state()
    for group in (0, 1):
        state.apply(planted.admitted(group), 1.0)
    state.apply(planted.finished(0, 0, 1.0), 2.0)
    state.apply(planted.finished(0, 0, 1.0, attempt=2), 3.0)
    state.apply(GroupClosed(1, "expired", "deadline", 1), 4.0)
    state.apply(planted.finished(1, 0, 1.0), 5.0)
    assert (state.groups.duplicate, state.groups.late) == (1, 1)


def test_memory_is_bounded_by_what_is_open():
    state = planted.plan().state()
    for group in range(20_000):
        state.apply(planted.admitted(group), 1.0)
        state.apply(planted.finished(group, 0, 1.0), 2.0)
        state.apply(planted.take(group + 1, [group]), 3.0)
    assert state.groups.endings == {"trained": 20_000}
    assert state.groups.open == {}
    assert len(state.groups._ended.held.starts) == 1
    assert len(state.samples.finished) == len(state.samples.taken) == 2048


def test_a_repeated_step_replaces_what_it_was():
    state = RunState()
    for step in (1, 2, 3, 2):
        state.apply(done(step))
    assert [one.step for one in state.steps] == [1, 2]


def test_the_newest_weights_count_whatever_comes_first(plan):
    state = RunState()
    for number in (2, 1):
        state.apply(announced(number))
    assert take_snapshot(state, plan, NOW_S).version == 2


# ---- figures -------------------------------------------------------------------------------------


def test_speed_and_idle_share_are_means_over_the_last_heartbeats(plan):
    state = RunState()
    for beat in range(9):
        state.apply(status("rollout-0", 60, beat))
    line = take_snapshot(state, plan, STARTED_S + 60 * STEP_S + 4).rollouts[0]
    assert line.tokens_per_s == pytest.approx(3700)
    assert line.recent_idle_share == pytest.approx(0.02)
    assert line.state == "generating"


def test_a_rollout_without_heartbeats_is_silent(state, plan):
    state.newest_s["ledger"] = NOW_S + 60  # text is written
    assert {o.state for o in take_snapshot(state, plan, NOW_S + 60).rollouts} == {"silent"}


def test_lag_is_counted_in_tokens_at_finish_and_when_trained():
    at = planted.moment(planted.healthy())
    tokens = planted.GROUPS * planted.SAMPLES * planted.LENGTH
    assert at.lag.finish == {0: tokens, 1: (planted.STEPS - 1) * tokens}
    assert at.lag.trained == at.lag.finish


def test_ages_are_those_of_the_oldest(plan):
    state = planted.healthy()
    for index in range(planted.SAMPLES):
        state.apply(planted.finished(planted.STEPS * 4, index, 1.0), planted.NOW_S - 0.4)
    at = planted.moment(state)
    assert at.queue.open_group_s == pytest.approx(1.0)
    assert at.queue.ready_group_s == pytest.approx(0.4)
    assert at.record_ages["status"] == pytest.approx(0.2)


@pytest.mark.parametrize(("event", "phase"), [("complete", "finished"), ("stopped", "stopped")])
def test_the_supervisor_reports_how_a_run_ended_until_it_resumes(event, phase):
    state = planted.healthy()
    state.apply_event({"time_s": planted.NOW_S, "event": event})
    ended = planted.moment(state, planted.NOW_S + 7200)
    assert (ended.phase, ended.is_over, ended.pace.left_s) == (phase, True, None)
    assert ended.elapsed_s == planted.moment(state, planted.NOW_S + 3600).elapsed_s
    state.apply_event({"time_s": planted.NOW_S, "event": "start", "role": "trainer"})
    assert not planted.moment(state).is_over


def test_a_run_without_a_supervisor_has_finished_when_all_are_gone():
    state = planted.healthy()
    for step in range(planted.STEPS + 1, 61):
        state.apply(planted.done(step, planted.NOW_S))
    assert planted.moment(state).phase == "last evaluation"
    assert planted.moment(state, planted.NOW_S + 60).phase == "finished"


# ---- the view of `run` ---------------------------------------------------------------------------


def test_the_short_frame_has_the_state_from_the_supervisor(state, plan):
    dead = RoleState("rollout-1", "restarting", 1, "died (SIGKILL), restart 1")
    for columns in (80, 160):
        text = drawn(take_snapshot(state, plan, NOW_S, [dead]), columns, None, detailed=False)
        assert {len(line) for line in text.splitlines()} == {columns}
        assert "! rollout-1 died (SIGKILL), restart 1" in text
        assert "1 restart ·" in text
        assert "0.819 sampled" in text


def test_without_a_terminal_the_view_prints_lines(plan, run_folder, capsys):
    bus = open_bus(f"sqlite:{run_folder.path / 'bus'}")
    for as_json in (False, True):
        onlooker = RunObserver(
            plan, run_folder.metrics, lambda: LogView(bus, None, ""), lambda: NOW_S, STARTED_S
        )
        with LiveView(onlooker, Console(file=io.StringIO()), as_json) as live:
            live.show([RoleState("trainer", "running", 0)])
    bus.close()
    people, programs = capsys.readouterr().out.splitlines()
    assert "step 60/90" in people
    assert "0.819 sampled" in people
    assert msgspec.json.decode(programs)["step"] == 60
