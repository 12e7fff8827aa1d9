"""The live view: a fold over records, figures of a moment, and a table that fits its terminal."""

import io
import random

import msgspec
import pytest
from rich.console import Console
from synthetic import GROUPS, SAMPLES, STARTED_S, STEP_S, admitted, announced, done, status, take

from rollstream.live.feed import Feed
from rollstream.live.snapshot import Snapshot, Title, snapshot
from rollstream.live.state import RunState
from rollstream.live.table import WIDE, clock, plain, render, spark
from rollstream.live.view import LiveView
from rollstream.supervisor import RoleState
from streams.connect import open_bus
from streams.records import GroupClosed

TITLE = Title("synthetic", 0, 90)
NOW_S = STARTED_S + 61 * STEP_S


@pytest.fixture
def state(run_folder) -> RunState:
    followed = RunState()
    bus = open_bus(f"sqlite:{run_folder.path / 'bus'}")
    Feed(bus, run_folder.metrics).follow(followed)
    bus.close()
    return followed


def moment(state: RunState, *roles: RoleState, now_s: float = NOW_S) -> Snapshot:
    return snapshot(state, roles, TITLE, STARTED_S, now_s)


def drawn(shown: Snapshot, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(shown, width))
    return console.file.getvalue()  # pyright: ignore


def test_the_view_of_a_run_has_its_figures(state):
    shown = moment(state)
    assert (shown.step, shown.steps, shown.phase) == (60, 90, "training")
    assert shown.counts == {"trained": 60 * GROUPS, "dead": 1}
    assert (shown.open_groups, shown.ready_groups) == (1, 0)
    assert shown.evaluation is not None
    assert shown.evaluation["step"] == 60
    assert shown.version == 60
    assert shown.left_s == pytest.approx(30 * STEP_S - STEP_S)
    assert [line.name for line in shown.rollouts] == ["rollout-0", "rollout-1"]


def test_a_group_is_ready_when_all_its_trajectories_finished():
    state = RunState()
    state.apply(admitted(7))
    for finished in range(SAMPLES):
        assert state.ready() == 0, finished
        state.apply_finished(7)
    assert state.ready() == 1


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
        for record in [*records, *records]:  # delivery is at least once
            state.apply(record)
        assert state.admitted == {}
        assert state.counts() == {"trained": 4, "expired": 1}
        assert [step.step for step in state.steps] == [1]


def test_a_repeated_step_replaces_what_it_was():
    state = RunState()
    for step in (1, 2, 3, 2):
        state.apply(done(step))
    assert [one.step for one in state.steps] == [1, 2]


def test_the_newest_weights_count_whatever_comes_first():
    state = RunState()
    for number in (2, 1):
        state.apply(announced(number))
    assert moment(state).version == 2


def test_speed_and_idle_share_are_means_over_the_last_heartbeats():
    state = RunState()
    for beat in range(9):
        state.apply(status("rollout-0", 60, beat))
    line = moment(state, now_s=STARTED_S + 60 * STEP_S + 4).rollouts[0]
    assert line.tokens_per_s == pytest.approx(3700)
    assert line.idle_share == pytest.approx(0.02)
    assert line.state == "generating"


def test_a_rollout_without_heartbeats_is_silent(state):
    assert {line.state for line in moment(state, now_s=NOW_S + 60).rollouts} == {"silent"}


@pytest.mark.parametrize("width", [80, 100, WIDE, 160, 240])
def test_the_table_fits_its_terminal(state, width):
    dead = RoleState("rollout-1", "restarting", 1, "died (SIGKILL), restart 1")
    text = drawn(moment(state, dead), width)
    assert {len(line) for line in text.splitlines()} == {width}
    for word in ("reward", "accuracy", "tokens/s", "lag", "queue", "rollout-0", "step 60 of 90"):
        assert word in text
    assert "rollout-1 died (SIGKILL), restart 1" in text
    assert "1 restart" in text


def test_before_the_first_record_there_is_a_table_too():
    text = drawn(moment(RunState()), 80)
    assert "none yet" in text
    assert "starting" in text
    assert plain(moment(RunState())).startswith("1:07 step 0/90 starting")


def test_without_a_terminal_the_view_prints_lines(state, run_folder, capsys):
    bus = open_bus(f"sqlite:{run_folder.path / 'bus'}")
    console = Console(file=io.StringIO())
    with LiveView(Feed(bus, run_folder.metrics), TITLE, console, as_json=False) as view:
        view.show([RoleState("trainer", "running", 0)])
    with LiveView(Feed(bus, run_folder.metrics), TITLE, console, as_json=True) as view:
        view.show([])
    bus.close()
    people, programs = capsys.readouterr().out.splitlines()
    assert "step 60/90" in people
    assert "0.819 sampled" in people
    assert msgspec.json.decode(programs)["step"] == 60


def test_clock_and_sparks():
    assert [clock(5), clock(125), clock(3725)] == ["0:05", "2:05", "1:02:05"]
    assert spark((0.0, 1.0, 0.5), 2) == "█▅"
    assert spark((1.0,)) == ""
