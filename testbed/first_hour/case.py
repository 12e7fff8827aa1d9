"""One thing that a user brings, and how it should end."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FirstHourCase:
    """`fault` does what the user does, in an empty folder that it gets, and returns what went
    wrong, in one line; an empty text if everything ended as it should. Cases of one `kind` have
    one cause. A case of more than a second of CPU is slow.
    """

    name: str
    kind: str
    fault: Callable[[Path], str]
    is_slow: bool = False
