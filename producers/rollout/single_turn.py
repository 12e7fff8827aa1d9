"""Answers to prompts: a trajectory is one turn, which the task judges (`SingleTurn`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.metric_values import MetricValues
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.chain import ChainContent
from rollstream.producers.rollout.judging import Finish
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.turn_driver import DriverScope, RolloutParts
from rollstream.producers.tasks.base import Task
from rollstream.streams.records import Trajectory


def open_answers(parts: RolloutParts, task: Task, scope: DriverScope) -> "SingleTurn":
    del task, scope
    return SingleTurn(parts)


@dataclass(slots=True)
class SingleTurn:
    parts: RolloutParts
    hold: bool = False
    """Whether the engine keeps a trajectory whose turn has ended."""
    running: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    parked: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    has_prompt: bool = True
    poll_s: float = float("inf")

    def chain_problem(self, content: ChainContent) -> str:
        return "it has turns of an agent" if content.turns or content.branches else ""

    def start(self, running: RunningTrajectory) -> None:
        engine, version = self.parts.engine, None
        # The version of the last generated tokens; a new trajectory gets the engine's newest.
        if self.parts.keep_version and engine.is_side_by_side:
            version = running.spans[-1].version if running.spans else engine.version
        engine.submit(running.request(self.hold, version))
        self.running[running.assignment.trajectory] = running

    def grow(self, emission: Emission) -> None:
        running = self.running[emission.trajectory]
        running.extend(emission)
        if emission.finish is not None:
            del self.running[emission.trajectory]
            running.end_turn()
            self.end_turn(running, emission.finish)

    def end_turn(self, running: RunningTrajectory, finish: Finish) -> None:
        """Decide what follows a turn that ended by `finish`: its reward."""
        self.parts.judging.judge(running, finish)

    def accept(self) -> None:
        """Do nothing: there is no program."""

    def wait(self, seconds: float) -> bool:
        return False

    def poll(self) -> list[Trajectory]:
        return self.parts.judging.poll()

    def drop(self, trajectory: str) -> None:
        self.parts.judging.drop(trajectory)
        if (self.running.pop(trajectory, None), self.parked.pop(trajectory, None)) != (None, None):
            self.parts.engine.abort(trajectory)

    def leave(self, trajectory: str) -> None:
        """Publish the last partial. If the tokens that the abort returns end the turn, its outcome
        is awaited instead.
        """
        running, emission = self.running[trajectory], self.parts.engine.abort(trajectory)
        if emission is not None and emission.finish is not None:
            self.grow(emission)
            return
        if emission is not None:
            running.extend(emission)
        del self.running[trajectory]
        self.parts.publisher.give_up([running])

    def leave_all(self) -> None:
        for trajectory in list(self.running):
            self.leave(trajectory)

    def growing(self) -> Sequence[RunningTrajectory]:
        return [*self.running.values(), *self.parked.values()]

    @property
    def awaited(self) -> int:
        return len(self.parts.judging)

    def open_max(self, room: int) -> int:
        return room

    @property
    def parked_max(self) -> int:
        return 0

    def metric_values(self) -> MetricValues:
        return {"rollout_replies_retried_total": 0}  # by an environment, which answers do not have

    def close(self) -> None:
        """Do nothing: no program runs here."""
