"""What a scorer's call gets in a reward process, and where that call is found."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rollstream.producers.tasks.base import Turns


class TrajectoryFacts(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a trajectory's record that the scorer sends to the reward process, besides
    reference and turns. `reward` and `scores` are those of the record; `reward` is None if it comes
    later.
    """

    trajectory: str
    group: int
    index: int
    task: str
    finish: Literal["stop", "length"]
    prompt: list[int]
    reward: float | None = None
    scores: dict[str, float] = {}  # msgspec copies empty defaults


Decode = Callable[[Sequence[int]], str]
ScoringCall = Callable[[TrajectoryFacts, str, Turns, Decode], object]
"""Scores one finished trajectory: its facts, the prompt's reference, its turns, and the text of
tokens.
"""
LOAD_SCORING = "rollstream.producers.scoring.functions:load_scoring"
"""Makes a `ScoringCall` of the import path of a user's function."""
