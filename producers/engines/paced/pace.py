"""The clock of a paced engine: seconds of the simulated accelerator, which may pass faster than
wall-clock seconds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class EngineClock(Protocol):
    @property
    def scale(self) -> float:
        """Accelerator seconds in one second of the caller's clock."""
        ...

    def now(self) -> float:
        """Accelerator seconds since an arbitrary start."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Sleep until `now` is at least `at_s`."""
        ...


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """Real time, `scale` times as fast."""

    scale: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def now(self) -> float:
        return self.clock() * self.scale

    def wait_until(self, at_s: float) -> None:
        while (rest := at_s - self.now()) > 0:
            self.sleep(rest / self.scale)
