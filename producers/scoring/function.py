"""A scorer's function, found by its import path."""

from collections.abc import Callable
from typing import cast

from producers.scoring.finished import Finished
from producers.tasks.importing import find_callable

Function = Callable[[Finished], object]
"""Gives a number, or numbers by the names of the annotations; may raise or hang."""


def load_function(path: str) -> Function:
    """What `module:function` names; a mistake is a ConfigurationError."""
    return cast(Function, find_callable(path, "scoring.function"))
