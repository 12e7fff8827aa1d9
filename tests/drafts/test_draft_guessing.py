"""What both engines learn from guesses, row by row, on a real history."""

import numpy as np
import pytest

from rollstream.producers.drafts import AnswerHistory
from rollstream.producers.drafts.gate import ADDITIVE, DECIDE_STEPS, DraftGate
from rollstream.producers.drafts.planner import StepCost
from rollstream.producers.drafts.source import Draft
from rollstream.producers.drafts.speculation import SHARE_TOKENS_MIN, DraftedSequence, Speculation
from rollstream.streams.values import Drafts

PROMPT, VOCABULARY = 7, 1000


def guessing(switch: DraftGate | None = None) -> Speculation:
    return Speculation(
        AnswerHistory(1 << 12), switch or DraftGate(ADDITIVE, forced=True), VOCABULARY
    )


def row(window: int = 8, told: int = 0) -> DraftedSequence:
    return DraftedSequence(PROMPT, 0, window, told)


@pytest.mark.parametrize(
    ("draft", "gained", "right", "window", "runs"),
    [
        ([1, 2, 3], [1, 2, 3, 9], 3, 10, (0, 3, 1)),
        ([1, 2, 3], [1, 9], 1, 2, (0, 1, 1)),
        ([1, 2, 3], [9], 0, 2, (1,)),
        (
            [1, 2, 3],
            [1, 2],
            2,
            10,
            (0, 2),
        ),  # it ended with a token that was guessed: all that was tried
        ([], [9], 0, 8, (1,)),
    ],
)
def test_what_was_right_of_a_draft_follows_from_what_the_pass_gave(
    draft: list[int], gained: list[int], right: int, window: int, runs: tuple[int, ...]
) -> None:
    engine, one = guessing(), row()
    engine.verified(one, draft, gained)
    assert one.window == window
    stats = engine.stats()
    assert (stats.proposed, stats.accepted) == (len(draft), right)
    assert one.how.say() == Drafts(runs, 1, len(draft), 0, 0, 0.0)


def test_siblings_hear_of_enough_news_at_once_and_never_of_what_was_all_guessed() -> None:
    history, one = AnswerHistory(1 << 12), row()
    engine = Speculation(history, DraftGate(forced=True), VOCABULARY)
    answer = np.arange(3 * SHARE_TOKENS_MIN, dtype=np.int32)
    engine.tell(one, answer[: SHARE_TOKENS_MIN - 1])
    assert (history.inserted, one.told) == (0, 0)
    engine.tell(one, answer[:SHARE_TOKENS_MIN])
    heard = history.inserted
    assert (heard > 20, one.told) == (True, SHARE_TOKENS_MIN)
    engine.tell(one, answer[: 2 * SHARE_TOKENS_MIN])
    assert (history.inserted, one.told) == (heard, 2 * SHARE_TOKENS_MIN)
    engine.verified(one, [1], [9])
    engine.tell(one, answer[: 2 * SHARE_TOKENS_MIN + 1], least=0)
    assert history.inserted == heard + 1


def test_what_is_only_compared_is_learned_from_and_counts_as_no_draft() -> None:
    engine = guessing(DraftGate())
    engine.compared(Draft([1, 2, 3], 5), [1, 2, 9])
    assert (engine.switch.right.right, engine.switch.right.tried) == (2, 3)
    engine.compared(Draft([], 0), [1, 2])
    assert engine.switch.right.tried == 3
    assert engine.attempt(row(), [1, 2, 3], 4).tokens == ()
    assert (engine.switch.found.tried, engine.stats().asked) == (1, 0)


def test_the_switch_is_thought_over_now_and_then_and_where_the_batch_changes() -> None:
    switch = DraftGate(forced=True)
    engine = guessing(switch)
    assert engine.decide(4, False)
    switch.forced = False
    assert [engine.decide(4, True) for _ in range(DECIDE_STEPS)] == [True] * 15 + [False]
    switch.forced = True
    assert not engine.decide(4, False)
    assert engine.decide(5, False)
    assert engine.stats().changes == 3


def test_lengths_are_levelled_where_a_pass_is_padded() -> None:
    switch = DraftGate()
    for tokens in (1, 5, 9, 30, 4, 17):
        switch.verified(1, tokens, 1, StepCost(1e-3, 1e-5).seconds(tokens))
    engine, rows = guessing(switch), [row() for _ in range(32)]
    longest = [32] + [2] * 31
    packed = engine.worth(rows, longest)
    assert packed[0] > 2
    assert engine.worth(rows, longest, is_padded=True) == [2] * 32
    assert engine.worth(rows, [0] * 32, is_padded=True) == [0] * 32
    switch.forced = True
    assert engine.worth(rows, longest, is_padded=True) == longest
