"""The report: built from log and metrics files alone, complete or partial, and its counts add
up.
"""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from rollstream.look.explorer.page_file import PAGE_BYTES
from rollstream.look.explorer.serving.report_file import write_report
from rollstream.look.monitor.groups import Intervals
from rollstream.look.monitor.state import RequestMove
from rollstream.look.report.cards import FULL_DETAIL
from rollstream.look.report.chart import Chart, Series, draw_chart, thinned, ticks
from rollstream.look.report.elements import html_of
from rollstream.look.report.history import RolloutHistory, RunHistory, ServedVersion, history_of
from rollstream.look.report.summary import open_history, summarise
from rollstream.look.report.timeline import draw_timeline, time_axis, timeline_rows, version_bars
from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.streams.records import GroupClosed, Superseded
from tests.index.indexed_records import index_of
from tests.report.report_html import report_html
from tests.support.synthetic_run import (
    GROUPS,
    STARTED_S,
    STEP_S,
    admitted,
    applied,
    done,
    take,
    trajectory,
)


@pytest.fixture(scope="module")
def history(run_folder) -> RunHistory:
    return open_history(run_folder)


def test_a_rollout_whose_versions_were_truncated_has_no_bars(history):
    """In a run that truncates without an archive, trajectories may outlive `applied`."""
    assert version_bars(RolloutHistory(history.rollouts["rollout-0"].busy)) == ()


def drawn_timeline(history: RunHistory) -> str:
    drawn = draw_timeline(history, FULL_DETAIL.marks)
    assert drawn is not None
    return html_of(drawn)


def drawings(text: str) -> list[ElementTree.Element]:
    """Every drawing, which must be well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_invariant_1_every_admitted_group_has_one_ending_and_the_counts_add_up(history):
    counts = history.outcomes
    assert counts == {
        "admitted": 60 * GROUPS + 2,
        "trained": 60 * GROUPS,
        "filtered": 0,
        "expired": 0,
        "dead": 1,
        "open": 1,
    }
    assert counts["admitted"] == sum(n for name, n in counts.items() if name != "admitted")


def test_the_summary_has_the_results_of_the_run(history):
    summary = summarise(history)
    assert (summary.steps, summary.steps_wanted, summary.restarts) == (60, 60, 1)
    assert summary.accuracy_sampled is not None
    assert summary.accuracy_sampled.text() == "0.260 → 0.819"
    assert (summary.goal_step, summary.goal_s) == (40, pytest.approx(40 * STEP_S))
    assert summary.lag_consumed_max == 4
    words = dict(summary.rows())
    assert words["held-out length, p99"] == "161 → 284"
    assert words["groups"].startswith("242 admitted, 240 trained")


def test_the_page_holds_everything_and_needs_nothing_else(history):
    text = report_html(history, summarise(history))
    for part in (
        "Held-out accuracy",
        "Styles of held-out answers",
        "Response length",
        "Reward",
        "Lag",
        "Entropy",
        "KL estimate",
        "Effective sample size",
        "Rollouts by version",
        "they add up",
        "dead: 1 of 2 survived",
        "rollout-1",
        "SIGKILL",
        "trainer.groups_per_step",
    ):
        assert part in text, part
    assert len(drawings(text)) == 12
    assert not re.search(r"<script|<link|https?://|src=|url\(", text)


def test_the_command_writes_the_page_and_prints_the_summary(run_folder, capsys):
    assert main(["report", str(run_folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"]["trained"] == 60 * GROUPS
    assert main(["report", str(run_folder.path)]) == 0
    assert "0.260 → 0.819" in capsys.readouterr().out
    assert run_folder.report.read_text().startswith("<!doctype html>")


def test_a_run_that_was_only_prepared_has_a_report(tmp_path, capsys):
    write_configuration(RunFolder(tmp_path), Configuration(folder=str(tmp_path)))
    assert main(["report", str(tmp_path)]) == 0
    assert "0 of 60" in capsys.readouterr().out
    text = RunFolder(tmp_path).report.read_text()
    assert "0 of 60" in text
    assert drawings(text) == []


def test_half_a_run_has_a_report():
    with index_of(admitted(0), trajectory(0, 0, 1), applied("rollout-0", 1)) as index:
        half = history_of(index)
    text = report_html(half, summarise(half))
    assert half.outcomes["open"] == 1
    assert "Held-out accuracy" not in text
    assert len(drawings(text)) == 1


def test_records_read_twice_and_repeated_steps_count_once():
    records = [admitted(0), take(1, range(1)), done(1)]
    with index_of(*records) as index, index_of(*records, *records) as repeated:
        once, twice = history_of(index), history_of(repeated)
    assert once.outcomes == twice.outcomes
    assert once.metric("reward_mean") == twice.metric("reward_mean")


def test_the_groups_of_a_superseded_take_are_dead_with_their_reason():
    why = "the learner failed 3 times on it: RuntimeError: CUDA error"
    ending = [Superseded(1, 0, (0,), (1,), why), GroupClosed(1, "dead", f"poisoned: {why}", 1)]
    records = [admitted(0), admitted(1), take(1, range(2)), *ending, done(1)]
    with index_of(*records, *records) as index:
        history = history_of(index)
    counts = history.outcomes
    assert (counts["trained"], counts["dead"], counts["open"]) == (1, 1, 0)
    assert f"poisoned: {why}" in report_html(history, summarise(history))


STEPS_LONG = 20_000


@pytest.fixture(scope="module")
def long_history() -> RunHistory:
    """20 000 steps of 2 s; 40 rollouts took each version at once, one of them died often."""
    history = RunHistory()
    for step in range(1, STEPS_LONG + 1):
        reward = 9.0 if step == 6_172 else 0.5
        measured = {"seconds": 1.9, "reward_mean": reward, "loss": math.sin(step), "kl": 0.01}
        history.steps[step] = replace(done(step), time_s=2.0 * step, metrics=measured)
    for number in range(40):
        rollout = history.rollouts.setdefault(f"rollout-{number}", RolloutHistory())
        for step in range(STEPS_LONG):
            rollout.serving.append(ServedVersion(2.0 * step, step, 1))
            if number or not 4_500 < step < 5_500:
                rollout.busy.add(2.0 * step, 2.0 * step + 1.5)
    history.moves = [RequestMove(s, "rollout-1", "rollout-2", 3) for s in range(STEPS_LONG)]
    history.events = [
        {"time_s": 2.0 * step, "event": "death", "role": "rollout-1", "code": -9}
        for step in range(STEPS_LONG)
    ]
    return history


def test_the_page_of_a_long_run_is_below_half_a_megabyte_and_names_what_is_left_out(
    long_history, tmp_path
):
    write_report(long_history, summarise(long_history), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert len(text.encode()) <= PAGE_BYTES
    assert drawings(text)
    for words in ("parts are drawn", "shows its newest version", "moves are drawn"):
        assert words in text


@pytest.mark.slow
def test_the_timeline_of_a_long_run_still_shows_its_gaps(long_history):
    """A pause of a twentieth of the run is a twentieth of the row."""
    row = next(row for row in timeline_rows(long_history) if row.name == "rollout-0")
    drawn = drawn_timeline(long_history)
    paths = re.findall(r'<path class="v\d" d="([^"]*)"><title>rollout-0,', drawn)
    pixels = sum(int(wide) for path in paths for wide in re.findall(r"h(\d+)v", path))
    assert len(row.bars) > 5_000
    assert 'class="pull"' not in drawn, "marks of 20 000 versions would hide the bars"
    assert 940 <= pixels <= 960


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400))
def test_a_thinned_line_keeps_every_extreme(values):
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thinned(points, 20)
    assert len(kept) <= max(40, 2 * 21 + 2)
    if kept == points:
        return
    finite = [point for point in points if math.isfinite(point[1])]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (finite[0], finite[-1])
    for bound in (min, max):
        assert bound(y for _, y in kept) == bound(y for _, y in finite)


def test_the_timeline_shows_each_version_where_it_was_served(history):
    bars = version_bars(history.rollouts["rollout-0"])
    versions = [bar.version for bar in bars]
    assert versions == sorted(versions)
    assert set(versions) == set(range(60))
    assert all(bar.end_s > bar.start_s for bar in bars)
    row = next(row for row in timeline_rows(history) if row.name == "rollout-1")
    assert row.deaths_s == (STARTED_S + 20 * STEP_S,)
    assert "rollout-1 died" in drawn_timeline(history)


def test_a_night_without_work_is_cut_out_of_the_timeline():
    history = RunHistory()
    for step, pause in ((1, 0.0), (2, 36_000.0)):
        record = done(step)
        metrics = {"seconds": 1.0}
        history.steps[step] = replace(record, metrics=metrics, time_s=record.time_s + pause)
    axis = time_axis(timeline_rows(history))
    assert axis is not None
    assert axis.length_s() == pytest.approx(1 + 1 + 2)
    assert axis.at(STARTED_S + 36_000.0 + 2 * STEP_S) == pytest.approx(4)


def test_what_a_name_contains_cannot_break_the_page():
    chart = Chart('<b>"&', (Series("</svg><script>", [(0, 1), (1, 2)]),))
    assert len(drawings(html_of(draw_chart(chart)))) == 1
    history = RunHistory(configuration={"run": "<script>alert(1)</script>"})
    assert "<script>" not in report_html(history, summarise(history))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 10))
def test_ticks_are_few_and_inside(low, span, count):
    marks = ticks(low, low + span, count)
    assert len(marks) <= count + 1
    assert all(low - span * 1e-6 - 1e-9 <= mark <= low + span * (1 + 1e-6) + 1e-9 for mark in marks)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 8)).map(lambda one: (one[0], one[0] + one[1]))
)


@given(INTERVALS)
def test_busy_is_the_union_of_its_intervals(intervals):
    busy = Intervals()
    for start, end in intervals:
        busy.add(start, end)
    covered = {second for start, end in intervals for second in range(start, end)}
    assert sum(busy.ends) - sum(busy.starts) == len(covered)
    assert all(end < start for end, start in zip(busy.ends, busy.starts[1:], strict=False))
    inside = sum(end - start for start, end in busy.within(10, 30))
    assert inside == len(covered & set(range(10, 30)))


@given(top=st.floats(0, 1e6, allow_subnormal=True))
def test_a_chart_of_any_height_is_drawn(top):
    """A synchronous run's KL is 1e-13, the rounding of its log-probabilities."""
    points = ((0.0, 0.0), (1.0, top))
    assert draw_chart(Chart("KL", (Series("kl", points),))).tag == "svg"
