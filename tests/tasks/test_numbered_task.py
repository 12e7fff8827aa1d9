"""Prompts that differ only in their number."""

from collections import Counter

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task


def test_every_pass_asks_each_prompt_once_in_an_order_of_its_own() -> None:
    task = load_task(TaskSettings(name="numbered", options={"prompts": 20, "prompt_tokens": 9}))
    passes = [[task.prompt(3, 20 * n + i) for i in range(20)] for n in range(3)]
    assert all(len({p.tokens for p in one}) == 20 for one in passes)
    assert all(len(p.tokens) == 9 for one in passes for p in one)
    assert passes[0][0].epoch == 0
    assert passes[2][0].epoch == 2
    assert [p.tokens for p in passes[0]] != [p.tokens for p in passes[1]]
    assert {p.tokens for p in passes[0]} == {p.tokens for p in passes[1]}
    assert not {p.tokens for p in task.held_out(5)} & {p.tokens for p in passes[0]}


def test_rewards_differ_within_groups_and_follow_from_the_answer() -> None:
    task = load_task(TaskSettings(name="numbered"))
    prompt = task.prompt(0, 0)
    rewards = [task.judge(prompt.reference, [[5, n]]).reward for n in range(200)]
    assert len(Counter(rewards)) == 2
    assert rewards == [task.judge(prompt.reference, [[5, n]]).reward for n in range(200)]


@pytest.mark.parametrize("options", [{"prompts": 0}, {"prompt_tokens": 0}, {"promts": 3}])
def test_options_that_mean_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="numbered"):
        load_task(TaskSettings(name="numbered", options=options))  # pyright: ignore[reportArgumentType]
