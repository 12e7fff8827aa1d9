"""A manual clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class HandClock:
    """Seconds that stand still until a test advances them."""

    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s
