"""Describes one parser to be fuzzed (`FuzzedParser`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rollstream.errors import RollstreamError


@dataclass(frozen=True, slots=True)
class FuzzedParser:
    """Holds a parser by its name: `damaged` makes an input, `parse` reads one, with a folder of its
    own for files. `errors` are the errors by which the parser refuses an input, as its docstring
    states; any other is a fault.
    """

    name: str
    damaged: Callable[[Random], Any]
    parse: Callable[[Any, Path], object]
    errors: tuple[type[Exception], ...] = (RollstreamError,)

    def is_parsed(self, damaged: Any, folder: Path) -> bool:
        """Returns whether the parser took the input; False if it refused it. Raises what the parser
        may not raise.
        """
        try:
            self.parse(damaged, folder)
        except self.errors:
            return False
        return True
