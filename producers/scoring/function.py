"""Loads a scorer's function by its import path."""

from collections.abc import Callable
from typing import cast

from rollstream.producers.scoring.functions import Finished
from rollstream.producers.tasks.importing import find_callable

ScoringFunction = Callable[[Finished], object]
"""Returns a number, or numbers by annotation name. It may raise or hang."""


def load_function(path: str) -> ScoringFunction:
    """The function that `module:function` names. Raises `ConfigurationError` for a wrong path."""
    return cast(ScoringFunction, find_callable(path, "scoring.function"))
