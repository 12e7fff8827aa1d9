"""What a scorer's call gets in a reward process, and where that call is found."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rollstream.producers.tasks.base import Turns


class TrajectoryFacts(msgspec.Struct, frozen=True, array_like=True):
    """A record's fields for the reward process; `reward` is None if it comes later."""

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
LOAD_SCORING = "rollstream.producers.scoring.functions:load_scoring"
"""Makes a `ScoringCall` of the import path of a user's function."""
