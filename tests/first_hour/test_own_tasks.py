"""What a class of one's own gets wrong is said of its member, before anything starts."""

import re
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import TaskPrompt
from rollstream.producers.tasks.remainder import Remainder
from rollstream.run.checks.task_facts import TaskOrder
from rollstream.run.checks.task_process import task_facts

ORDER = TaskOrder(0, None, 4, False, False, False)


class Stopless(Remainder):
    name = "stopless"
    stop: Any = 3


class Forgetful(Remainder):
    name = "forgetful"

    def held_out(self, count: int) -> Any:
        return None


class Lazy(Remainder):
    name = "lazy"

    def held_out(self, count: int) -> Any:
        return (self.prompt(0, place) for place in range(count))


class Tupled(Remainder):
    name = "tupled"

    def prompt(self, seed: int, position: int) -> Any:
        return (1, 2)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Stopless, "task 'stopless': stop = 3 must be a tuple of token numbers"),
        (Forgetful, "task 'forgetful': held_out(4) returned a NoneType, not a list"),
        (Lazy, "task 'lazy': held_out(4) returned a generator, not a list"),
        (Tupled, "returned a tuple, not a TaskPrompt"),
    ],
)
def test_a_fault_of_ones_own_task_is_named(task: type[Remainder], says: str):
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        task_facts(task(), ORDER)


def test_tokens_of_numpy_are_taken(monkeypatch: pytest.MonkeyPatch):
    import numpy as np

    task = Remainder()
    tokens = tuple(np.array(task.prompt(0, 0).tokens))
    monkeypatch.setattr(task, "prompt", lambda seed, position: TaskPrompt(tokens, "{}"))
    facts = task_facts(task, ORDER)
    assert all(type(number) is int for number in (facts.largest_token, facts.longest[0].tokens))
