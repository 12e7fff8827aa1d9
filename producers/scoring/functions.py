"""Loads a scorer's function by its import path, and defines the argument of its calls.

A scorer adds rewards or other scores to finished trajectories. Its function is called with one
`Finished` trajectory at a time, in a process for rewards (`producers/rewards/process.py`), and
returns one number or several named ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import msgspec

from rollstream.import_path import find_callable
from rollstream.producers.tasks.base import Turns


class TrajectoryFacts(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a trajectory's record that its scoring process gets, besides the turns."""

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
    """A finished trajectory, as a scorer's function gets it. `turns` are all tokens after the
    prompt, cut where their source changes. `reference` is the task's own JSON about the prompt.
    Text is decoded on access.
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
    """Load the function at the path `module:function`. Raises `ConfigurationError` for a wrong
    path.
    """
    return cast(ScoringFunction, find_callable(path, "scoring.function"))
