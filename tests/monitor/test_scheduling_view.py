"""The display of dispatch's work on the long tail in `top` and the report: moves, waiting
assignments, expected and real lengths.
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from rollstream.look.monitor.state import (
    MOVES_FILE,
    MOVES_KEPT,
    RequestMove,
    foreign_line,
    parse_move,
    parse_moves,
)
from rollstream.look.report.cards import FULL_DETAIL
from rollstream.look.report.elements import html_of
from rollstream.look.report.history import RolloutHistory, RunHistory, ServedVersion
from rollstream.look.report.summary import open_history, summarise
from rollstream.look.report.timeline import draw_timeline
from rollstream.storage.metrics_file import MetricsFile
from tests.report.report_html import report_html
from tests.support import planted_states as planted
from tests.support.planted_states import drawn


def moved_state():
    state = planted.healthy(3)
    for line in (
        planted.move(70, "rollout-0", "rollout-1", 9),
        planted.move(30, "rollout-0", "rollout-2", 5),
        planted.move(4, "rollout-2", "rollout-1", 7),
    ):
        state.apply_move(line)
    return state


@pytest.mark.parametrize("columns", [80, 160])
def test_the_frame_names_the_newest_moves_and_counts_those_of_the_last_minute(columns):
    text = drawn(planted.moment(moved_state()), columns, 60)
    assert "12 requests in 2 moves" in text
    assert "rollout-2 → rollout-1 (7) 4.0 s ago" in " ".join(text.split())


def test_waiting_assignments_and_waiting_requests_are_distinguished():
    state = planted.healthy(1)
    state.apply(replace_status(waiting=30, queued=22))
    at = planted.moment(state)
    assert (at.scheduling.queued, at.scheduling.waiting) == (22, 8)
    assert "22 assignments · 8 requests in engines" in drawn(at, 80, 60)


def replace_status(**changes):
    status = planted.status("rollout-0", planted.NOW_S)
    return type(status)(**{f: getattr(status, f) for f in status.__struct_fields__} | changes)


def test_lengths_are_compared_with_what_was_expected():
    state = planted.plan().state()
    for index, expected in enumerate((planted.LENGTH, 2 * planted.LENGTH, 0)):
        state.apply(planted.finished(0, index, 1.0, predicted=expected))
    foreseen = planted.moment(state).scheduling.foreseen
    assert foreseen is not None
    assert (foreseen.count, foreseen.real) == (2, planted.LENGTH), "0 is no expectation"
    assert foreseen.error_share == 0.5
    assert planted.moment(planted.plan().state()).scheduling.foreseen is None


def test_a_line_that_is_no_move_is_passed_over_and_memory_is_bounded():
    """Invariant 8; a foreign file must not end an observer."""
    good = planted.move(1, "a", "b", 2)
    rubbish = [{}, {**good, "requests": "two"}, {**good, "source": None}, {"time_s": "now"}]
    assert parse_moves([*rubbish, good]) == [RequestMove(planted.NOW_S - 1, "a", "b", 2, 0.001)]
    assert parse_move({**good, "plan_s": None}) == RequestMove(planted.NOW_S - 1, "a", "b", 2)
    state = planted.healthy(1)
    for _ in range(MOVES_KEPT + 10):
        state.apply_move(good)
    assert len(state.moves) == MOVES_KEPT


def test_moves_of_long_ago_are_marked():
    state = planted.healthy(1)
    state.apply_move(planted.move(600, "rollout-0", "rollout-1", 2))
    assert "none in the last minute" in drawn(planted.moment(state), 80, 60)


def test_a_name_cannot_move_the_cursor():
    state = planted.healthy(1)
    state.apply_move(planted.move(1, "\x1b[2Jroll", "b\nc", 1))
    assert "\x1b[2J" not in drawn(planted.moment(state), 80, 60)


def timeline_of(moves: list[RequestMove]) -> RunHistory:
    history = RunHistory(moves=moves)
    for name in ("a", "b", "<c>"):
        rollout = RolloutHistory(serving=[ServedVersion(100.0, 0, 1), ServedVersion(130.0, 1, 1)])
        rollout.busy.add(100.0, 160.0)
        history.rollouts[name] = rollout
    return history


def drawn_timeline(moves: list[RequestMove]) -> str:
    drawn = draw_timeline(timeline_of(moves), FULL_DETAIL.marks)
    assert drawn is not None
    return html_of(drawn)


def test_the_timeline_draws_moves_as_arrows_and_marks_pulls():
    moves = [
        RequestMove(120.0, "a", "b", 9),
        RequestMove(125.0, "b", "<c>", 1),
        RequestMove(126.0, "gone", "a", 1),
    ]
    drawing = drawn_timeline(moves)
    ElementTree.fromstring(drawing)
    assert "a handed 9 requests to b" in drawing
    assert "b handed 1 request to &lt;c&gt;" in drawing
    assert drawing.count('class="move"') == 2, "a rollout that is not drawn has no arrows"
    assert drawing.count('class="pull"') == 3, "the first version was not pulled"
    arrows = re.findall(r'class="move" d="M[\d.]+ ([\d.]+)V([\d.]+)m', drawing)
    (down, down_tip), (up, up_tip) = (map(float, arrow) for arrow in arrows)
    assert down_tip > down, "from the row that gave …"
    assert up_tip < up, "… to the one that took"


def test_moves_of_one_plan_stand_side_by_side():
    moves = [RequestMove(120.0, "a", "b", 9), RequestMove(120.001, "b", "<c>", 1)]
    left, right = re.findall(r'class="move" d="M([\d.]+) ', drawn_timeline(moves))
    assert float(right) - float(left) > 5


def test_moves_outside_of_what_is_drawn_are_left_out():
    assert 'class="move"' not in drawn_timeline([RequestMove(10_000.0, "a", "b", 1)])


def test_the_report_reads_moves_from_the_runs_folder(run_folder):
    with MetricsFile(run_folder.metrics / MOVES_FILE) as lines:
        lines.append(planted.move(1, "rollout-0", "rollout-1", 3))
    assert open_history(run_folder).moves == [
        RequestMove(planted.NOW_S - 1, "rollout-0", "rollout-1", 3, 0.001)
    ]
    with MetricsFile(run_folder.metrics / MOVES_FILE) as lines:
        lines.append(foreign_line({"status": 7}, planted.NOW_S))
    read = open_history(run_folder)
    assert len(read.moves) == 1
    assert read.state.foreign == {"status": 7}
    assert "7 in status" in report_html(read, summarise(read))
    (run_folder.metrics / MOVES_FILE).unlink()
    assert open_history(run_folder).moves == []


def test_a_snapshot_without_moves_is_marked():
    at = planted.moment(planted.healthy(1))
    assert "none yet" in drawn(replace(at), 80, 60)
