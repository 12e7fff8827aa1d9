"""One `Deadline` bounds a whole operation and is passed to all its calls and retries, in place of a
full timeout for each.
"""

import time
from collections.abc import Callable


class Deadline:
    """A point in time, `seconds` after its creation by the monotonic `clock`. It interrupts
    nothing: callers check it. A deadline of 0 seconds has passed at once.
    """

    __slots__ = ("_clock", "_end")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_s(self) -> float:
        return max(0.0, self._end - self._clock())

    def passed(self) -> bool:
        return self._clock() >= self._end
