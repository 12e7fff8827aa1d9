"""The frame of a moment fits its terminal and cuts nothing that matters."""

from dataclasses import replace

import pytest

from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.format import (
    age,
    clock,
    short_number,
    shortened,
    sparkline,
    wrap_parts,
)
from rollstream.look.monitor.state import DeadLetters
from rollstream.look.monitor.table import plain_line
from rollstream.look.monitor.view import WIDE_COLUMNS
from tests.support import planted_states as planted
from tests.support.planted_states import drawn

NBSP = "\N{NO-BREAK SPACE}"
IMPORTANT = ("reward", "tokens/s", "queue", "groups", "versions", "at finish", "trained")


@pytest.mark.parametrize("columns", [80, WIDE_COLUMNS - 1, WIDE_COLUMNS, 160])
@pytest.mark.parametrize("lines", [None, 24, 40, 60])
@pytest.mark.parametrize("rollouts", [1, 4, 40])
def test_the_frame_fits_its_terminal_and_nothing_that_matters_is_cut(columns, lines, rollouts):
    state = planted.healthy(rollouts, reward=lambda index: 0.0)
    state.dead_letters = {"trajectories": DeadLetters(3, "no record")}
    at = planted.moment(state)
    text = drawn(replace(at, concerns=warnings_of(at)), columns, lines)
    rows = text.splitlines()
    assert {len(row) for row in rows} == {columns}
    assert lines is None or len(rows) <= lines
    assert all(word in text for word in IMPORTANT)
    assert "step 20 of 60" in text
    assert "3 of trajectories" in " ".join(text.split())
    assert "! records that could not be decoded" in text
    shown = sum(f"rollout-{number} " in text for number in range(rollouts))
    assert shown >= min(rollouts, 4)
    more = f"… and {rollouts - shown} more"
    assert (more in text) == (shown < rollouts)
    assert "60/64" in text
    assert "20k/33k" in text
    assert "v20✓" in text


def test_of_many_rollouts_the_worst_come_first():
    state = planted.healthy(40)
    state.apply(planted.status("rollout-31", planted.NOW_S - 42, term=2))
    state.apply(planted.status("rollout-7", planted.NOW_S, verified=False))
    text = drawn(planted.moment(state), 80, 40)
    assert text.index("rollout-31") < text.index("rollout-7 ") < text.index("rollout-0 ")
    assert f"silent 42{NBSP}s" in text
    assert "v20!" in text


def test_all_rollouts_stand_in_their_order_where_they_fit():
    text = drawn(planted.moment(planted.healthy(12)), 160, 40)
    places = [text.index(f"rollout-{number} ") for number in range(12)]
    assert places == sorted(places)
    assert "more" not in text


@pytest.mark.parametrize("columns", [80, 160])
def test_before_the_first_step_there_is_a_frame_too(columns):
    at = planted.moment(planted.plan().state())
    text = drawn(at, columns, 40)
    assert {len(row) for row in text.splitlines()} == {columns}
    assert "none yet" in text
    assert "starting" in text
    assert plain_line(at).startswith("0:00 step 0/60 starting")


@pytest.mark.parametrize("columns", [80, 160])
def test_what_others_wrote_cannot_break_the_frame(columns):
    state = planted.healthy()
    name = "rollout-\x1b[31m" + "x" * 200 + "-7"
    state.apply(planted.status(name))
    for index in range(8):
        odd = planted.finished(999, index, None, finish="dead", reason="\x1b[2J\n名前 [bold]" * 40)
        state.apply(odd, planted.NOW_S)
    state.dead_letters = {"status": DeadLetters(1, "\x07 [/red]")}
    at = replace(planted.moment(state), trouble="disk \x1b[0m full")
    text = drawn(replace(at, concerns=warnings_of(at)), columns, 60)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]" in text
    assert "! disk ?[0m full" in text


def test_a_very_narrow_terminal_is_no_error():
    for columns in (1, 5, 20, 40, 60):
        assert drawn(planted.moment(planted.healthy(3)), columns, 10)


# ---- words ---------------------------------------------------------------------------------------


def test_clock_ages_and_sparks():
    assert [clock(5), clock(125), clock(3725)] == ["0:05", "2:05", "1:02:05"]
    expected = [f"0.4{NBSP}s", f"42{NBSP}s", "12:31", "3:02:05", f"5{NBSP}d{NBSP}3{NBSP}h"]
    assert [age(s) for s in (0.4, 42, 751, 10_925, 5 * 86_400 + 3 * 3600)] == expected
    assert [short_number(n) for n in (0, 940, 9_400, 12_345, 999_600)] == [
        "0",
        "940",
        "9.4k",
        "12k",
        "1.0M",
    ]
    assert sparkline((0.0, 1.0, 0.5), 2) == "█▅"
    assert sparkline((1.0,)) == ""


def test_parts_are_broken_between_and_names_are_cut_in_the_middle():
    assert wrap_parts(["one", "two", "three"], 9) == ["one · two", "three"]
    assert wrap_parts(["longer than the line"], 5) == ["longer than the line"]
    assert shortened("rollout-of-a-host-17", 12) == "rollo…ost-17"
