"""One time bound per operation, passed down instead of a new timeout per call."""

import time
from collections.abc import Callable


class Deadline:
    """A point in time `seconds` from now on the monotonic `clock`. A deadline of 0 seconds has
    passed at once.
    """

    __slots__ = ("_clock", "_end")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - self._clock())

    def passed(self) -> bool:
        return self._clock() >= self._end
