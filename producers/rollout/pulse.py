"""The heartbeat of a rollout: when a status is due, and the speed and idle time that it reports."""

from dataclasses import dataclass
from typing import Literal

Health = Literal["starting", "generating", "draining", "pulling", "leaving"]


@dataclass(slots=True)
class Pulse:
    """A status is due every `every_s` seconds and at every change of health. Times are the caller's
    clock.
    """

    every_s: float
    said_s: float = 0.0
    health: Health = "starting"
    tokens: int = 0
    idle_s: float = 0.0
    looked_s: float = 0.0

    def look(self, health: Health, busy: bool, now_s: float) -> bool:
        """Whether a status is due; time between two looks at which nothing ran counts as idle."""
        if self.looked_s and not busy:
            self.idle_s += now_s - self.looked_s
        self.looked_s = now_s
        return health != self.health or now_s - self.said_s >= self.every_s

    def said(self, health: Health, tokens: int, now_s: float) -> float:
        """Note that a status goes out now; returns tokens per second since the previous one."""
        speed = (tokens - self.tokens) / max(1e-3, now_s - self.said_s) if self.said_s else 0.0
        self.said_s, self.health, self.tokens = now_s, health, tokens
        return speed
