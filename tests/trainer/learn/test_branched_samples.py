"""Episodes that branch: each generated token is trained once, with the gradient that the paths as
sequences of their own would give.
"""

import numpy as np
from msgspec.structs import replace

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, path_rows, token_rows
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.values import Branch, Turn
from tests.streams.test_branches import episode

RECORD = episode("ppgg" "pg" "gg" "pg", (Branch(6, 3), Branch(8, 1)))  # fmt: skip


def test_each_generated_token_is_trained_in_exactly_one_row():
    rows = path_rows(sample_of(RECORD, 1.0))
    assert [row.tokens.tolist() for row in rows] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 6, 7],
        [0, 1, 8, 9],
    ]
    trained = [row.tokens[row.trained].tolist() for row in rows]
    assert trained == [[2, 3, 5], [6, 7], [9]]


def test_scored_tokens_are_in_the_order_of_the_episode():
    sample = sample_of(RECORD, 1.0)
    rows = token_rows([sample])
    assert rows.targets.tolist() == [2, 3, 5, 6, 7, 9]
    before = rows.tokens[rows.scored].tolist()
    assert before == [1, 2, 4, 3, 6, 8]
    inputs = loss_inputs([sample], 0)
    assert inputs.sequences == 1  # the episode is one sequence of the loss
    assert len(inputs.behaviour) == 6


def test_masked_tokens_of_a_branch_leave_no_row():
    sample = sample_of(RECORD, 1.0)
    sample.mask[:] = [True, True, True, False, False, True]
    assert [row.tokens[row.trained].tolist() for row in path_rows(sample)] == [[2, 3, 5], [9]]


def test_an_episode_without_branches_has_its_tokens_as_only_row():
    sample = sample_of(episode("pggpg", ()), 1.0)
    (row,) = path_rows(sample)
    assert np.array_equal(row.tokens, sample.tokens)
    assert len(sample) == 5
    assert len(sample_of(RECORD, 1.0)) == 16


def test_abandoned_turns_have_no_row_and_no_loss_and_are_counted_apart():
    """Also under `keep_version`, which drops a sample with tokens above `max_lag`."""
    left = replace(RECORD, abandoned=(1, 2), turns=turns_of_branches())
    assert refusal(left, TrainingBounds()) is None
    for keep in (False, True):
        rule = training_rule(TrainerSettings(), 4, keep)
        records = [replace(left, trajectory=f"0.{n}", index=n, reward=float(n)) for n in (0, 1)]
        prepared = prepare_group(0, records, {}, rule, 1)
        assert len(prepared.samples) == 2
        assert prepared.counts["abandoned_tokens"] == 2 * 3
        assert prepared.counts["masked_tokens"] == 0
        for sample in prepared.samples:
            assert sample.group_tokens == 2 * 3
            rows = [row.tokens[row.trained].tolist() for row in path_rows(sample)]
            assert rows == [[2, 3], [9]]


def turns_of_branches() -> tuple[Turn, ...]:
    """Four turns; the second continues the first, the others branch."""
    edges = ((0, 2, 4), (4, 5, 6), (6, 6, 8), (8, 9, 10))
    return tuple(Turn(str(place), "", *place, "stop", 0.0, 0.0) for place in edges)
