"""A scorer's function runs in a reward process and returns one number or several named ones."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import cast

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_function
from rollstream.producers.rewards.facts import Decode, ScoringCall, TrajectoryFacts
from rollstream.producers.tasks.base import Turns
from rollstream.producers.tasks.mixture import part_reference
from rollstream.streams.foreign_text import clean_text


@dataclass(frozen=True, slots=True)
class Finished:
    """`reference` is the task's for the prompt (in a mixture the part's): a text as it is, another
    value as JSON text.
    """

    facts: TrajectoryFacts
    reference: str
    turns: Turns
    decode: Callable[[Sequence[int]], str] = field(repr=False)

    def __post_init__(self) -> None:
        task_reference = part_reference(self.reference, self.facts.task)
        object.__setattr__(self, "reference", _readable(task_reference))

    @property
    def prompt(self) -> str:
        return self.decode(self.facts.prompt)

    @property
    def answer(self) -> str:
        """The text of all tokens after the prompt, replies of an environment included."""
        return self.decode([token for turn in self.turns for token in turn])


def _readable(reference: str) -> str:
    try:
        value: object = json.loads(reference)
    except (ValueError, RecursionError):  # a task of the user has any text
        return reference
    # Without escapes: a judge reads `北京`, not the numbers of its characters.
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return clean_text(text)


ScoringFunction = Callable[[Finished], object]
"""A number, or numbers by annotation names; it may raise or hang."""


def load_function(path: str) -> ScoringFunction:
    """Raises `ConfigurationError` if the function does not exist, does not take one argument, or is
    an `async def`.
    """
    function = find_function(path, "scoring.function", ("finished",))
    if iscoroutinefunction(function):
        raise ConfigurationError(
            f"scoring.function = {path!r} is an `async def`; a scorer's function returns its scores"
        )
    return cast(ScoringFunction, function)


def load_scoring(path: str) -> ScoringCall:
    """Returns the function, to be called with the parts of a `Finished`; raises as
    `load_function`.
    """
    function = load_function(path)

    def score(facts: TrajectoryFacts, reference: str, turns: Turns, decode: Decode) -> object:
        return function(Finished(facts, reference, turns, decode))

    return score
