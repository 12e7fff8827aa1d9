"""The observable state of one process: its metrics sources, its readers, and its loop's progress.

A role polls its stop event once per iteration of its loop. The event records the time of each poll,
so roles need no code for liveness and pay only for reading a clock.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollstream.metric_values import MetricValues
from rollstream.streams.reader import TopicReader

MetricsSource = Callable[[], MetricValues]
ReadersSource = Callable[[], Sequence[TopicReader]]


class TimedStopEvent(threading.Event):
    """The stop event of a role; records when it was last polled."""

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
class LoopHealth:
    """`starting` until the role offers metrics (a standby stays so until it holds the lease);
    `stalled` if its loop has made no iteration for too long.
    """

    state: Literal["starting", "running", "stopping", "stalled"]
    turn_age_s: float


class ProcessMetrics:
    """One process: roles register sources, the endpoint reads them. Roles must use `stop`."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked = clock, stop
        self.stop = TimedStopEvent(stop, clock)
        self.sources: list[MetricsSource] = []
        self.beside: list[MetricsSource] = []
        """Sources of what the role uses, such as its log; they do not mark the role as running."""
        self.readers: list[ReadersSource] = []

    def offer(self, source: MetricsSource, readers: ReadersSource | None = None) -> None:
        """Add metrics and readers to what the endpoint serves."""
        self.sources.append(source)
        if readers is not None:
            self.readers.append(readers)

    def turn_age_s(self) -> float:
        """Returns the seconds since the last iteration of the role's loop."""
        return max(0.0, self._clock() - self.stop.turned_s)

    def health(self, stalled_s: float) -> LoopHealth:
        """Returns the state; `stalled` after `stalled_s` seconds without an iteration of
        the loop.
        """
        age = self.turn_age_s()
        if age > stalled_s:
            return LoopHealth("stalled", age)
        if self._asked.is_set():
            return LoopHealth("stopping", age)
        return LoopHealth("running" if self.sources else "starting", age)
