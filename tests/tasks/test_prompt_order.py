"""The prompts that the source publishes, and those that it refuses by position."""

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.prompt_source import PromptOrder
from rollstream.producers.tasks.base import TaskPrompt
from rollstream.streams.values import Sampling


def order(*prompts: TaskPrompt) -> PromptOrder:
    def prompt(seed: int, position: int) -> TaskPrompt:
        return prompts[position]

    return PromptOrder("whole", prompt, Sampling(stop=(2,)), 4, 7, tokens_max=3)


def test_a_prompt_carries_the_label_and_the_stops_of_its_part():
    plain, part = order(TaskPrompt((1,), "r"), TaskPrompt((1,), "r", 0, "part", (5, 6))).at, 1
    assert (plain(0).task, plain(0).sampling.stop) == ("whole", (2,))
    assert (plain(part).task, plain(part).sampling.stop) == ("part", (5, 6))


def test_a_prompt_that_no_engine_would_take_is_refused_by_its_position():
    """Otherwise every sample of its group would die, and those of the next."""
    made = order(TaskPrompt((1, 2, 3), ""), TaskPrompt((1, 2, 3, 4), "", task="part"))
    assert made.at(0).group == 0
    with pytest.raises(
        ConfigurationError, match=r"task part, prompt 1 of seed 7: 4 tokens .* the 3"
    ):
        made.at(1)
    with pytest.raises(ConfigurationError, match="it has no tokens"):
        order(TaskPrompt((), "")).at(0)
