"""A clock that tests move by hand."""

from dataclasses import dataclass


@dataclass(slots=True)
class HandClock:
    """Seconds that stand still until a test moves them."""

    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s
