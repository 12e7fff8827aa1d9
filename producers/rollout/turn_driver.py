"""How a rollout's trajectories get their turns. `TURN_DRIVERS` names the drivers by strings: a run
imports only its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.import_path import load_option
from rollstream.metric_values import MetricValues
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.engines.base import Emission, Engine
from rollstream.producers.rollout.chain import ChainContent
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.producers.tasks.base import Environment, Task
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.records import Trajectory

TURN_DRIVERS: Mapping[str, str] = {
    "answers": "rollstream.producers.rollout.single_turn:open_answers",
    "dialogue": "rollstream.producers.environments.dialogue:open_dialogue",
    "episodes": "rollstream.producers.agents.service:open_episodes",
}
"""By name, `module:function` that opens the driver (`OpenDriver`)."""


@dataclass(frozen=True, slots=True)
class RolloutParts:
    engine: Engine
    judging: Judging
    publisher: RolloutPublisher
    settings: RolloutSettings
    clock: Callable[[], float] = time.time

    @property
    def keep_version(self) -> bool:
        """Whether a trajectory keeps the version it began with."""
        return self.settings.on_update == "keep_version"


@dataclass(frozen=True, slots=True)
class DriverScope:
    task: TaskSettings
    agent: AgentSettings
    store: ObjectStore
    model: str
    """The name of the model in answers to programs."""


class TurnDriver(Protocol):
    """For the rollout's loop alone: from `start` until `poll` returns the record, or until `drop`
    or `leave`; one attempt of each trajectory at a time.
    """

    @property
    def parts(self) -> RolloutParts: ...

    @property
    def running(self) -> dict[str, RunningTrajectory]:
        """Trajectories that the engine generates or has queued."""
        ...

    @property
    def parked(self) -> dict[str, RunningTrajectory]:
        """Trajectories that wait for another program, without a slot."""
        ...

    @property
    def has_prompt(self) -> bool:
        """Whether a trajectory begins with its assignment's prompt; else its program brings it."""
        ...

    @property
    def poll_s(self) -> float:
        """The longest time to decode, in seconds, until the next `accept`."""
        ...

    def chain_problem(self, content: ChainContent) -> str:
        """Returns why a trajectory cannot continue from this chain of partials; "" if it can."""
        ...

    def start(self, running: RunningTrajectory) -> None:
        """Raises `EngineRefused`, and has not taken the trajectory, if the engine cannot generate
        it.
        """
        ...

    def grow(self, emission: Emission) -> None: ...

    def accept(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Wait for a program's request; False, at once, where none can come."""
        ...

    def poll(self) -> list[Trajectory]:
        """Returns the records that end trajectories, since the last call."""
        ...

    def drop(self, trajectory: str) -> None:
        """Drops a trajectory, of which no record follows; an unknown one is ignored."""
        ...

    def leave(self, trajectory: str) -> None:
        """Hand a trajectory, marked `leaving`, over by its last partial. The outcome of an ended
        turn is awaited first: a reward finishes it here.
        """
        ...

    def leave_all(self) -> None:
        """As `leave`, but await no replies: the rollouts that resume these trajectories request
        them again.
        """
        ...

    def growing(self) -> Sequence[RunningTrajectory]:
        """Returns those whose new tokens are published by time: none where the driver publishes
        every turn.
        """
        ...

    @property
    def awaited(self) -> int:
        """Number of trajectories whose ended turn's outcome is awaited."""
        ...

    def open_max(self, room: int) -> int:
        """Returns the most open trajectories if `room` of them may run."""
        ...

    @property
    def parked_max(self) -> int:
        """Number of trajectories that may be parked beside full slots."""
        ...

    def metric_values(self) -> MetricValues: ...

    def close(self) -> None:
        """Refuse further requests of programs, and end those that run here."""
        ...


OpenDriver = Callable[[RolloutParts, Task, DriverScope], TurnDriver]
"""Opens a driver for this task. Raises `ConfigurationError` if the machine lacks what it needs."""


def open_driver(parts: RolloutParts, task: Task, scope: DriverScope) -> TurnDriver:
    """Raises `ConfigurationError` if the machine lacks what the driver needs."""
    opener: OpenDriver = load_option(TURN_DRIVERS[_driver_name(task, scope)])
    return opener(parts, task, scope)


def _driver_name(task: Task, scope: DriverScope) -> str:
    if scope.agent.is_active:
        return "episodes"
    return "dialogue" if isinstance(task, Environment) else "answers"
