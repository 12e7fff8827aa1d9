"""The acceptance that both engines learn row by row, on a real history."""

import numpy as np
import pytest

from rollstream.producers.drafts.gate import ADDITIVE, DECIDE_STEPS, DraftGate
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.planner import StepCost
from rollstream.producers.drafts.speculation import SHARE_TOKENS_MIN, DraftedSequence, Speculation
from rollstream.producers.engines.drafting import Draft
from rollstream.streams.values import Drafts

PROMPT, VOCABULARY = 7, 1000


def guessing(gate: DraftGate | None = None) -> Speculation:
    return Speculation(AnswerHistory(1 << 12), gate or DraftGate(ADDITIVE, forced=True), VOCABULARY)


def row(window: int = 8, shared: int = 0) -> DraftedSequence:
    return DraftedSequence(PROMPT, 0, window, shared)


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
        ),  # it ended with a drafted token: all that was tried
        ([], [9], 0, 8, (1,)),
    ],
)
def test_what_was_right_of_a_draft_follows_from_what_the_pass_gave(
    draft: list[int], gained: list[int], right: int, window: int, runs: tuple[int, ...]
) -> None:
    engine, one = guessing(), row()
    engine.add_verified(one, draft, gained)
    assert one.window == window
    stats = engine.stats()
    assert (stats.proposed, stats.accepted) == (len(draft), right)
    assert one.statistics.take() == Drafts(runs, 1, len(draft), 0, 0, 0.0)


def test_siblings_get_enough_new_tokens_at_once_and_never_only_accepted_drafts() -> None:
    history, one = AnswerHistory(1 << 12), row()
    engine = Speculation(history, DraftGate(forced=True), VOCABULARY)
    answer = np.arange(3 * SHARE_TOKENS_MIN, dtype=np.int32)
    engine.share_tokens(one, answer[: SHARE_TOKENS_MIN - 1])
    assert (history.inserted, one.shared) == (0, 0)
    engine.share_tokens(one, answer[:SHARE_TOKENS_MIN])
    inserted = history.inserted
    assert (inserted > 20, one.shared) == (True, SHARE_TOKENS_MIN)
    engine.share_tokens(one, answer[: 2 * SHARE_TOKENS_MIN])
    assert (history.inserted, one.shared) == (inserted, 2 * SHARE_TOKENS_MIN)
    engine.add_verified(one, [1], [9])
    engine.share_tokens(one, answer[: 2 * SHARE_TOKENS_MIN + 1], fresh_min=0)
    assert history.inserted == inserted + 1


def test_a_compared_draft_is_learned_from_and_counts_as_no_draft() -> None:
    engine = guessing(DraftGate())
    engine.add_trial(Draft([1, 2, 3], 5), [1, 2, 9])
    assert (engine.gate.acceptance_rate.right, engine.gate.acceptance_rate.tried) == (2, 3)
    engine.add_trial(Draft([], 0), [1, 2])
    assert engine.gate.acceptance_rate.tried == 3
    assert engine.look_up_trial(1, [1, 2, 3], 4).tokens == ()
    assert (engine.gate.hit_rate.tried, engine.stats().asked) == (1, 0)


def test_the_switch_is_thought_over_now_and_then_and_where_the_batch_changes() -> None:
    gate = DraftGate(forced=True)
    engine = guessing(gate)
    assert engine.decide(4, False)
    gate.forced = False
    assert [engine.decide(4, True) for _ in range(DECIDE_STEPS)] == [True] * 15 + [False]
    gate.forced = True
    assert not engine.decide(4, False)
    assert engine.decide(5, False)
    assert engine.stats().changes == 3


def test_lengths_are_levelled_where_a_pass_is_padded() -> None:
    gate = DraftGate()
    for tokens in (1, 5, 9, 30, 4, 17):
        gate.add_pass(1, tokens, 1, StepCost(1e-3, 1e-5).seconds(tokens))
    engine, rows = guessing(gate), [row() for _ in range(32)]
    longest = [32] + [2] * 31
    packed = engine.choose_lengths(rows, longest)
    assert packed[0] > 2
    assert engine.choose_lengths(rows, longest, is_padded=True) == [2] * 32
    assert engine.choose_lengths(rows, [0] * 32, is_padded=True) == [0] * 32
    gate.forced = True
    assert engine.choose_lengths(rows, longest, is_padded=True) == longest
