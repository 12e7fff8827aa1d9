"""The dispatcher's state of one rollout and of one open group."""

from dataclasses import dataclass, field

from rollstream.simulator.replica import Replica
from rollstream.simulator.work import SimulatedTrajectory


@dataclass(slots=True, eq=False)
class SimulatedRollout:
    """A rollout as the dispatcher sees it, with its replica."""

    replica: Replica
    speed: float = 1.0
    alive: bool = True
    failing: str = ""
    """The rollout dies at the end of the present step: `failure`, or `preemption` with notice."""
    pulling: bool = False
    wanted: int = 0
    """The version that it is to take, or is taking."""
    draining: bool = False
    """Its quota is drawn and a newer version is visible; used by the timeline only."""
    moving: dict[str, str] | None = None
    """Trajectories that it is about to give up → target rollout, or empty for a restart."""
    expecting: int = 0
    """Trajectories on their way to it."""
    drawn: int = 0
    """New trajectories since it took its version or became empty."""
    tokens: float = 0.0
    """Predicted tokens of its trajectories."""
    kv_previous: int = 0
    """KV use at the last check, or the maximum under its version (`Policy.peak`)."""

    def held(self) -> int:
        """Number of trajectories that it runs, queues or expects."""
        return len(self.replica.running) + len(self.replica.waiting) + self.expecting

    def is_open(self) -> bool:
        """Whether it takes assignments."""
        return self.alive and not self.pulling and self.moving is None


@dataclass(slots=True)
class SimulatedGroup:
    """A group that is admitted and not complete."""

    wave: int
    missing: int
    finished: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
