"""How the trajectories of a rollout get their turns (`TurnDriver`): as answers to prompts
(`single_turn`), dialogues with the environment, or episodes of an agent's program.

`TURN_DRIVERS` names them by strings: a run imports only its own (`open_driver`).
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
    """The parts of one rollout under one term that a driver works with."""

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
    """What a driver needs of the run's settings."""

    task: TaskSettings
    agent: AgentSettings
    store: ObjectStore
    model: str
    """The name of the model in answers to programs."""


class TurnDriver(Protocol):
    """Drives the trajectories of one rollout under one term through their turns, for the rollout's
    loop alone: from `start` until `poll` returns the record, or until `drop` or `leave`; one
    attempt of each at a time.
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
        """Take a trajectory, perhaps with its chain's content. Raises `EngineRefused`, and has not
        taken it, if the engine cannot generate it.
        """
        ...

    def grow(self, emission: Emission) -> None:
        """Append what the engine generated."""
        ...

    def accept(self) -> None:
        """Take what programs requested since the last call."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for a program's request. Returns False, at once, where none can
        come.
        """
        ...

    def poll(self) -> list[Trajectory]:
        """Returns the records that end trajectories, since the last call."""
        ...

    def drop(self, trajectory: str) -> None:
        """Remove the trajectory, also from the engine; no record of it follows. An unknown one is
        ignored.
        """
        ...

    def leave(self, trajectory: str) -> None:
        """Hand a running or parked trajectory, marked `leaving`, over to another rollout by its
        last partial. The outcome of an ended turn is awaited first: a reward finishes it here, and
        after a reply it is handed over.
        """
        ...

    def leave_all(self) -> None:
        """Hand over all running and parked trajectories as in `leave`, but await no replies: the
        rollouts that resume these trajectories request them again.
        """
        ...

    def growing(self) -> Sequence[RunningTrajectory]:
        """Returns the trajectories whose new tokens are published by time: none where the driver
        publishes every turn.
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

    def metric_values(self) -> MetricValues:
        """Returns the rollout's metrics about turns."""
        ...

    def close(self) -> None:
        """Refuse further requests of programs, and end those that run here."""
        ...


OpenDriver = Callable[[RolloutParts, Task, DriverScope], TurnDriver]
"""Opens a driver for this task. Raises `ConfigurationError` if the machine lacks what it needs."""


def open_driver(parts: RolloutParts, task: Task, scope: DriverScope) -> TurnDriver:
    """Returns the driver for the run's task and settings. Raises `ConfigurationError` if the
    machine lacks what it needs.
    """
    opener: OpenDriver = load_option(TURN_DRIVERS[_driver_name(task, scope)])
    return opener(parts, task, scope)


def _driver_name(task: Task, scope: DriverScope) -> str:
    if scope.agent.is_active:
        return "episodes"
    return "dialogue" if isinstance(task, Environment) else "answers"
