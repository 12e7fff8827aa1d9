"""Bounds the time of a whole operation: its calls share one `Deadline` instead of each having a
timeout of its own.
"""

import time
from collections.abc import Callable


class Deadline:
    """Passes `seconds` after its creation, by the monotonic `clock`. A deadline of 0 seconds has
    passed at once.
    """

    __slots__ = ("_clock", "_end")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_s(self) -> float:
        """Returns the seconds left, never below 0."""
        return max(0.0, self._end - self._clock())

    def passed(self) -> bool:
        return self._clock() >= self._end
