"""Episodes that branch: each generated token is trained once, with the gradient that the paths as
sequences of their own would give.
"""

import numpy as np

from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, path_rows, token_rows
from rollstream.streams.values import Branch
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
