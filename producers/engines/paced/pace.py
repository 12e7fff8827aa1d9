"""The clock of a paced engine: seconds of the accelerator that it stands for, which may pass faster
than those on the wall.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Pace(Protocol):
    @property
    def scale(self) -> float:
        """Seconds of the accelerator in one second of whoever polls."""
        ...

    def now(self) -> float:
        """Seconds of the accelerator since some moment."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Return when `now` is at least `at_s`, costing no processor time meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class RealPace:
    """Real time, `scale` times as fast."""

    scale: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def now(self) -> float:
        return self.clock() * self.scale

    def wait_until(self, at_s: float) -> None:
        while (rest := at_s - self.now()) > 0:
            self.sleep(rest / self.scale)
