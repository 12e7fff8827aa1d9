"""Acceptance probabilities by the length of the match, and the draft lengths that follow from them:
pure rules.
"""

import pytest
from hypothesis import given, strategies as st

from rollstream.producers.drafts.planner import (
    CURVE_EDGES,
    KNOWN_AFTER_MISTAKE,
    KNOWN_TOKENS_MAX,
    REFRESH_TRIALS,
    AcceptanceCurve,
    DraftOdds,
    DraftRow,
    HistoryAgreement,
    StepCost,
    draft_lengths,
    tokens_per_s,
)
from rollstream.producers.engines.drafting import NO_DRAFT, Draft

CHANCES = st.lists(st.floats(0.0, 1.0), min_size=32, max_size=32)


def learned(known: int, share: int, chances: AcceptanceCurve) -> None:
    """Of ten single tokens after so many matched ones this many are accepted, repeated often."""
    for number in range(400):
        chances.add(known, 1, number % 10 < share)


def test_chances_are_learned_by_what_was_known_to_agree() -> None:
    chances = AcceptanceCurve(8)
    learned(3, 3, chances)
    learned(7, 9, chances)
    assert chances.probability(3) == pytest.approx(0.3, abs=0.05)
    assert chances.probability(7) == pytest.approx(0.9, abs=0.05)
    assert chances.probability(5) == pytest.approx(0.9, abs=0.05)  # nothing was observed there


def test_right_tokens_of_a_draft_are_known_for_those_behind_them() -> None:
    """After 3 matched tokens: 3, 4 and 5 are accepted, 6 is rejected; later tokens were not
    tried.
    """
    chances = AcceptanceCurve(8)
    before = [chances.probability(known) for known in range(12)]
    chances.add(3, 6, 3)
    after = [chances.probability(known) for known in range(12)]
    assert [b > a for a, b in zip(before, after, strict=True)] == [3 <= k <= 5 for k in range(12)]
    assert [b < a for a, b in zip(before, after, strict=True)] == [k == 6 for k in range(12)]


def test_odds_are_a_product_along_the_curve_and_are_renewed() -> None:
    chances = AcceptanceCurve(3)
    learned(4, 5, chances)
    odds = chances.odds(3)
    assert len(odds.whole) == 3
    assert -odds.whole[1] == pytest.approx(chances.probability(3) * chances.probability(4))
    assert odds.gains[2] == pytest.approx(-odds.whole[0] - odds.whole[1])
    assert chances.odds(3) is odds
    chances.add(3, REFRESH_TRIALS, REFRESH_TRIALS)
    assert chances.odds(3) is not odds
    assert chances.odds(KNOWN_TOKENS_MAX + 100) is chances.odds(KNOWN_TOKENS_MAX)
    assert CURVE_EDGES[-1] <= KNOWN_TOKENS_MAX


def test_agreement_goes_back_further_than_what_is_looked_up() -> None:
    agreement, context, tokens = HistoryAgreement(), 7, range(8)
    agreement.start_draft(Draft(tokens, 5), context)
    assert agreement.known == 5
    agreement.end_draft(
        8, 8
    )  # 5, 8 accepted tokens, and one more that fits if the whole context does
    agreement.start_draft(Draft(tokens, 7), context)
    assert agreement.known == 14
    agreement.start_draft(Draft(tokens, 4), context)  # it was not verified
    assert agreement.known == 4
    agreement.end_draft(8, 2)
    agreement.start_draft(Draft(tokens, 7), context)
    assert agreement.known == 7


def test_behind_a_mistake_the_last_draft_continues_until_a_match_is_found() -> None:
    agreement, context = HistoryAgreement(), 7
    assert list(agreement.start_draft(Draft([1, 2, 3, 4, 5, 6, 7, 8], 7), context)) == [
        *range(1, 9)
    ]
    agreement.end_draft(6, 2)  # 3 was another token
    assert list(agreement.start_draft(NO_DRAFT, context)) == [4, 5, 6, 7, 8]
    assert agreement.known == 1
    agreement.end_draft(2, 1)  # 4 was accepted, 5 was another token
    assert list(agreement.start_draft(NO_DRAFT, context)) == [6, 7, 8]
    agreement.end_draft(0, 0)  # not worth a draft: the model sampled one token
    assert list(agreement.start_draft(NO_DRAFT, context)) == [7, 8]
    assert agreement.known == KNOWN_AFTER_MISTAKE
    assert list(agreement.start_draft(Draft([5], 3), context)) == [5]
    assert agreement.known == 3
    agreement.end_draft(1, 1)
    assert list(agreement.start_draft(NO_DRAFT, context)) == []


@given(CHANCES, st.floats(1e-4, 1.0), st.integers(0, 32))
def test_a_draft_is_cut_where_its_odds_fall_below_the_price(
    chances: list[float], price: float, window: int
) -> None:
    row = DraftRow(window, 0.0, DraftOdds.of(chances))
    length = row.worth_while(price)
    whole = [-one for one in DraftOdds.of(chances).whole]
    assert length <= window
    assert all(one >= price for one in whole[:length])
    assert length == window or whole[length] <= price


@given(
    st.lists(st.tuples(CHANCES, st.integers(0, 32)), min_size=1, max_size=3),
    st.floats(1e-5, 1e-2),
    st.floats(0, 1e-3),
)
def test_no_change_of_one_length_makes_a_batch_of_any_odds_faster(
    given_rows: list[tuple[list[float], int]], fixed_s: float, token_s: float
) -> None:
    rows = [DraftRow(window, 0.0, DraftOdds.of(chances)) for chances, window in given_rows]
    cost = StepCost(fixed_s, token_s)
    lengths = draft_lengths(rows, cost)
    best = tokens_per_s(rows, lengths, cost)
    for index, row in enumerate(rows):
        for other in range(row.window + 1):
            changed = [*lengths[:index], other, *lengths[index + 1 :]]
            assert tokens_per_s(rows, changed, cost) <= best * (1 + 1e-6)
