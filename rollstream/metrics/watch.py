"""What one process offers to whoever looks at it: its figures, its readers, and whether its loop
turns.

A role asks its stop event once per turn of its loop, so the event itself knows when the loop turned
last and no role has to say so. It never harms the role: noting the time is all that it does.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from streams.figures import Figures
from streams.reader import TopicReader

AskFigures = Callable[[], Figures]
AskReaders = Callable[[], Sequence[TopicReader]]


class Turns(threading.Event):
    """The stop event of a role, which notes when it was asked."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        super().__init__()
        self._stop, self._clock = stop, clock
        self.turned_s = clock()

    def is_set(self) -> bool:
        self.turned_s = self._clock()
        return self._stop.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.turned_s = self._clock()
        is_stopped = self._stop.wait(timeout)
        self.turned_s = self._clock()
        return is_stopped

    def set(self) -> None:
        self._stop.set()

    def clear(self) -> None:
        self._stop.clear()


@dataclass(frozen=True, slots=True)
class Health:
    """`starting` until the role offers figures (a standby waits so for its lease); `stalled` when
    its loop has not turned for too long.
    """

    state: Literal["starting", "running", "stopping", "stalled"]
    turn_age_s: float


class Watch:
    """One process; roles offer, the endpoint asks. `stop` is the event that the role must use."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked = clock, stop
        self.stop = Turns(stop, clock)
        self.figures: list[AskFigures] = []
        self.beside: list[AskFigures] = []
        """Of what a role works with, its log: they do not say that it runs."""
        self.readers: list[AskReaders] = []

    def offer(self, figures: AskFigures, readers: AskReaders | None = None) -> None:
        """From now on these are part of what is served."""
        self.figures.append(figures)
        if readers is not None:
            self.readers.append(readers)

    def turn_age_s(self) -> float:
        """Seconds since the role's loop turned."""
        return max(0.0, self._clock() - self.stop.turned_s)

    def health(self, stalled_s: float) -> Health:
        """`stalled` when the loop has not turned for `stalled_s` seconds, whatever else it does."""
        age = self.turn_age_s()
        if age > stalled_s:
            return Health("stalled", age)
        if self._asked.is_set():
            return Health("stopping", age)
        return Health("running" if self.figures else "starting", age)
