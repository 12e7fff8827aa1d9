"""A finished trajectory as a scorer's function gets it: the record's facts, its tokens by turn, and
their text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from producers.tasks.base import Turns


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What of a record travels to the process that scores it, beside its turns."""

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
    """`turns` is all that came after the prompt, cut where its source changes; `reference` is the
    task's own JSON about the prompt. Text is decoded when it is asked for.
    """

    facts: Facts
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
