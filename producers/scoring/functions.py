"""A scorer's function, loaded by its import path, and the finished trajectory that it gets: facts
of the record, tokens by turn, and text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import msgspec

from rollstream.import_path import find_callable
from rollstream.producers.tasks.base import Turns


class TrajectoryFacts(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a record that its scoring process gets, besides the turns."""

    trajectory: str
    group: int
    index: int
    task: str
    finish: Literal["stop", "length"]
    prompt: list[int]
    reward: float | None = None
    scores: dict[str, float] = {}  # msgspec copies empty defaults


@dataclass(frozen=True, slots=True)
class Finished:
    """`turns` are all tokens after the prompt, cut where their source changes. `reference` is the
    task's own JSON about the prompt. Text is decoded on access.
    """

    facts: TrajectoryFacts
    reference: str
    turns: Turns
    decode: Callable[[Sequence[int]], str] = field(repr=False)

    @property
    def prompt(self) -> str:
        """The prompt's text."""
        return self.decode(self.facts.prompt)

    @property
    def answer(self) -> str:
        """The text of everything after the prompt."""
        return self.decode([token for turn in self.turns for token in turn])


ScoringFunction = Callable[[Finished], object]
"""Returns a number, or numbers by annotation name. It may raise or hang."""


def load_function(path: str) -> ScoringFunction:
    """The function that `module:function` names. Raises `ConfigurationError` for a wrong path."""
    return cast(ScoringFunction, find_callable(path, "scoring.function"))
