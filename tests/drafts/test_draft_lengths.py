"""Draft windows and lengths: pure rules. The gate has `test_draft_switch.py`."""

import pytest
from hypothesis import given, strategies as st

from rollstream.producers.drafts.gate import ADDITIVE, MARGINAL, MULTIPLICATIVE, SuccessRate
from rollstream.producers.drafts.planner import (
    DraftRow,
    StepCost,
    StepTimes,
    best_draft_speed,
    draft_lengths,
    expected_gain,
    level_lengths,
    tokens_per_s,
)

ROWS = st.lists(
    st.builds(DraftRow, st.integers(0, 32), st.floats(0, 1)),
    min_size=1,
    max_size=4,
)


def test_the_additive_window_grows_by_two_and_starts_again() -> None:
    window, seen = 2, []
    for proposed, accepted in [(2, 2), (4, 4), (1, 1), (0, 0), (8, 7), (2, 2)]:
        window = ADDITIVE.after(window, proposed, accepted)
        seen.append(window)
    assert seen == [4, 6, 8, 8, 2, 4]
    assert ADDITIVE.after(32, 32, 32) == 32


def test_the_multiplicative_window_doubles_and_halves() -> None:
    window, seen = 2, []
    for proposed, accepted in [(2, 2), (4, 4), (8, 8), (16, 16), (16, 3), (8, 0), (4, 1), (2, 0)]:
        window = MULTIPLICATIVE.after(window, proposed, accepted)
        seen.append(window)
    assert seen == [4, 8, 16, 16, 8, 4, 2, 2]


def test_the_marginal_rule_bounds_nothing_but_the_longest_draft() -> None:
    assert [MARGINAL.after(32, 32, accepted) for accepted in (0, 5, 32)] == [32, 32, 32]


@given(ROWS, st.floats(1e-5, 1e-2), st.floats(0, 1e-3))
def test_no_change_of_one_length_makes_the_batch_faster(
    rows: list[DraftRow], fixed_s: float, token_s: float
) -> None:
    cost = StepCost(fixed_s, token_s)
    lengths = draft_lengths(rows, cost)
    best = tokens_per_s(rows, lengths, cost)
    assert all(0 <= n <= row.window for n, row in zip(lengths, rows, strict=True))
    for index, row in enumerate(rows):
        for other in range(row.window + 1):
            changed = [*lengths[:index], other, *lengths[index + 1 :]]
            assert tokens_per_s(rows, changed, cost) <= best * (1 + 1e-6)


def test_drafts_shrink_as_decoding_becomes_compute_bound() -> None:
    one = [DraftRow(32, 0.9)]
    free = draft_lengths(one, StepCost(1e-3, 1e-6))[0]
    dear = draft_lengths(one, StepCost(1e-3, 5e-4))[0]
    assert free > dear > 0
    assert draft_lengths(one * 64, StepCost(1e-4, 1e-3)) == [0] * 64


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.93, 1.0])
def test_the_gain_of_a_draft_is_the_sum_of_its_powers(rate: float) -> None:
    assert expected_gain(rate, 5) == pytest.approx(sum(rate**i for i in range(1, 6)), rel=0.01)


def test_step_times_find_the_line_and_ignore_an_interruption() -> None:
    times = StepTimes()
    for tokens in [1, 5, 9, 30, 4, 17, 2, 8] * 4:
        times = times.seen(tokens, 2e-3 + 1e-4 * tokens)
    found = times.cost()
    assert (found.fixed_s, found.token_s) == pytest.approx((2e-3, 1e-4), rel=1e-6)
    disturbed = times.seen(5, 10.0).cost()
    assert disturbed.seconds(5) < 1.5 * found.seconds(5)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 10)), max_size=40))
def test_fitted_costs_are_never_negative(seen: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for tokens, seconds in seen:
        times = times.seen(tokens, seconds)
    cost = times.cost()
    assert cost.token_s >= 0
    assert cost.fixed_s >= -1e-9


def test_a_share_counts_tries_up_to_the_first_mistake() -> None:
    share = SuccessRate()
    share.add(5, 2)
    assert (share.right, share.tried) == (2, 3)
    assert share.rate(0.0) == pytest.approx(2 / 7)
    assert SuccessRate().rate(0.7) == pytest.approx(0.7)


def test_the_best_draft_is_as_long_as_it_pays() -> None:
    cost = StepCost(1e-3, 1e-5)
    assert best_draft_speed(1, 32, 1.0, 0.95, cost) > 8 * 1 / cost.seconds(1)
    assert best_draft_speed(1, 32, 0.0, 0.95, cost) == 0
    assert best_draft_speed(64, 32, 1.0, 0.3, StepCost(1e-5, 1e-3)) == 0


@given(ROWS, st.floats(1e-5, 1e-2), st.floats(0, 1e-3))
def test_levelled_lengths_are_cut_to_one_of_them(
    rows: list[DraftRow], fixed_s: float, token_s: float
) -> None:
    lengths = [row.window for row in rows]
    found = level_lengths(rows, lengths, StepCost(fixed_s, token_s))
    assert max(found) in lengths
    assert found == [min(n, max(found)) for n in lengths]


def test_one_long_draft_is_cut_where_it_leaves_everybody_else_waiting() -> None:
    rows = [DraftRow(32, 0.9)] + [DraftRow(2, 0.5)] * 31
    lengths = [row.window for row in rows]
    assert max(level_lengths(rows, lengths, StepCost(1e-3, 1e-4))) == 2
    assert level_lengths(rows, lengths, StepCost(1e-3, 0.0)) == lengths
