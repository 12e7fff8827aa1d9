"""What dispatch knows of one rollout beside its engine, and of one open group."""

from dataclasses import dataclass, field

from simulator.replica import Replica
from simulator.work import Work


@dataclass(slots=True, eq=False)
class Seat:
    """A rollout as dispatch sees it."""

    replica: Replica
    speed: float = 1.0
    alive: bool = True
    failing: str = ""
    """It dies at the end of the present step: `failure`, or `preemption` with notice."""
    pulling: bool = False
    wanted: int = 0
    """Version that it is to take, or is taking."""
    draining: bool = False
    """Its quota is drawn and a newer version out; only the timeline asks."""
    moving: dict[str, str] | None = None
    """What it is about to give up: trajectory → rollout, empty where it starts again."""
    expecting: int = 0
    """Trajectories on their way to it."""
    drawn: int = 0
    """New ones since it took its version or emptied itself."""
    tokens: float = 0.0
    """Expected of what it has."""
    kv_previous: int = 0
    """At the last check, or the most under its version (`Policy.peak`)."""

    def given(self) -> int:
        return len(self.replica.running) + len(self.replica.waiting) + self.expecting

    def is_open(self) -> bool:
        """Takes orders."""
        return self.alive and not self.pulling and self.moving is None


@dataclass(slots=True)
class OpenGroup:
    """Admitted and not complete."""

    wave: int
    missing: int
    finished: list[Work] = field(default_factory=list[Work])
