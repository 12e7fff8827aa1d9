"""Paths of an episode whose tokens branch, and what admission refuses."""

import re

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.branches import (
    LEAVES_MAX,
    abandoned_tokens,
    branch_depths,
    branch_problem,
    kept_tokens,
    leaves,
    path_to,
    reached_turns,
)
from rollstream.streams.records import GENERATED, PROMPT, Trajectory
from rollstream.streams.values import Branch, Span, Turn, Version


def turns_of_sources(sources: str) -> tuple[Turn, ...]:
    """Returns a turn for each run of generated tokens, with the tokens before it."""
    turns: list[Turn] = []
    for found in re.finditer("p*(g+)", sources):
        place = (found.start(), found.start(1), found.end())
        turns.append(Turn(str(place), "", *place, "stop", 0.0, 0.0))
    return tuple(turns)


def episode(sources: str, branches: tuple[Branch, ...]) -> Trajectory:
    kinds = np.array([GENERATED if each == "g" else PROMPT for each in sources], np.uint8)
    generated = int((kinds == GENERATED).sum())
    return Trajectory(
        trajectory="0.0", group=0, index=0, attempt=1, task="t", rollout="r", rollout_term=1,
        tokens=np.arange(len(kinds), dtype=np.uint32), sources=kinds,
        logprobs=np.full(generated, -1.0, np.float32),
        spans=(Span(0, generated, Version(0, 1)),), finish="stop", reward=1.0,
        trainer_version=Version(0, 1), started_s=0.0, finished_s=1.0, branches=branches,
        turns=turns_of_sources(sources),
    )  # fmt: skip


def test_without_branches_all_tokens_are_one_path():
    assert [path.tolist() for path in leaves(3, ())] == [[0, 1, 2]]


def test_each_token_that_none_continues_ends_a_path():
    branches = (Branch(5, 2), Branch(7, 4), Branch(9, -1))
    found = [path.tolist() for path in leaves(11, branches)]
    assert found == [[0, 1, 2, 5, 6], [0, 1, 2, 3, 4, 7, 8], [9, 10]]
    assert {index for path in found for index in path} == set(range(11))


def test_a_branch_of_a_branch_follows_both_places():
    assert path_to(8, (Branch(4, 1), Branch(7, 5))).tolist() == [0, 1, 4, 5, 7, 8]


@pytest.mark.parametrize(
    "branches", [(Branch(0, -1),), (Branch(3, 3),), (Branch(9, 1),), (Branch(4, 1), Branch(4, 2))]
)
def test_branches_that_are_no_tree_are_refused(branches: tuple[Branch, ...]):
    assert branch_problem(9, branches)
    refused = refusal(episode("ppggppggg", branches), TrainingBounds())
    assert refused is not None
    assert refused.kind == "branches"


def test_a_path_that_begins_with_a_generated_token_is_refused():
    refused = refusal(episode("ppggpg", (Branch(3, -1),)), TrainingBounds())
    assert refused is not None
    assert refused.kind == "branches"


def test_the_context_bounds_each_path_and_not_their_sum():
    record = episode("ppggpg", (Branch(4, -1),))
    assert refusal(record, TrainingBounds(context_max=4)) is None
    refused = refusal(record, TrainingBounds(context_max=3))
    assert refused is not None
    assert refused.kind == "tokens"


def test_turns_that_do_not_cover_the_generated_tokens_are_refused():
    record = episode("ppggpg", ())
    assert refusal(record, TrainingBounds()) is None
    for turns in (record.turns[:1], record.turns[1:], turns_of_sources("pggppg")):
        refused = refusal(replace(record, turns=turns), TrainingBounds())
        assert refused is not None
        assert refused.kind == "turns"


def test_each_turn_has_the_number_of_branches_on_its_path() -> None:
    """Turns of ten tokens: the second continues the first, the third branches from it, the fourth
    from the third, the fifth begins anew, the sixth continues the second and is no fork.
    """
    forks = ("", "", "template", "template", "conversation", "")
    turns = [
        Turn("", "", 10 * n, 10 * n + 5, 10 * n + 10, "stop", 0.0, 0.0, fork)
        for n, fork in enumerate(forks)
    ]
    branches = (Branch(20, 9), Branch(30, 25), Branch(40, -1), Branch(50, 19))
    assert branch_depths(turns, branches) == [0, 0, 1, 2, 0, 0]
    assert branch_depths(turns[:2], ()) == [0, 0]


def test_turns_of_two_conversations_that_alternate_are_two_paths() -> None:
    """Ten turns of each, one after the other: 19 branches, of which one is a fork."""
    branches = (Branch(2, -1), *(Branch(at, at - 3) for at in range(4, 40, 2)))
    paths = leaves(40, branches)
    assert [path.tolist() for path in paths] == [
        [at for at in range(40) if at % 4 in (0, 1)],
        [at for at in range(40) if at % 4 in (2, 3)],
    ]
    assert not branch_problem(40, branches)


def test_the_paths_are_bounded_and_not_the_branches() -> None:
    alternating = (Branch(2, -1), *(Branch(at, at - 3) for at in range(4, 1200, 2)))
    assert not branch_problem(1200, alternating)
    alone = tuple(Branch(at, -1) for at in range(2, 2 * LEAVES_MAX + 2, 2))
    assert not branch_problem(2 * LEAVES_MAX, alone[:-1])
    assert branch_problem(2 * LEAVES_MAX + 2, alone).startswith(f"{LEAVES_MAX + 1} paths")


ABANDONED = replace(episode("ppgg" "pg" "pgg", (Branch(6, 3),)), abandoned=(1,))  # fmt: skip
"""The second turn continues the first, the third too."""


def test_abandoned_turns_are_admitted_and_only_what_others_reach_is_kept() -> None:
    assert refusal(ABANDONED, TrainingBounds()) is None
    turns, branches = ABANDONED.turns, ABANDONED.branches
    assert reached_turns(turns, branches, [2]) == {0, 2}
    assert kept_tokens(turns, branches, (1,)).tolist() == [True] * 4 + [False] * 2 + [True] * 3
    assert abandoned_tokens(turns, (1,)).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("abandoned", [(0,), (0, 1), (3,), (-1,), (1, 1), (0, 1, 2)])
def test_abandoned_turns_that_cannot_be_are_refused(abandoned: tuple[int, ...]) -> None:
    """One that a trained turn continues, one that there is not, one named twice, or all."""
    refused = refusal(replace(ABANDONED, abandoned=abandoned), TrainingBounds())
    assert refused is not None
    assert refused.kind == "turns"


def test_a_trajectory_without_turns_abandons_none() -> None:
    refused = refusal(replace(ABANDONED, turns=(), branches=()), TrainingBounds())
    assert refused is not None
    assert refused.kind == "turns"
