"""Runs dialogues (`Dialogue`): after each turn of the model the task's environment replies, until
its reply is empty; then the task judges the whole.
"""

import logging
from dataclasses import dataclass, field

import numpy as np

from rollstream.errors import EngineRefused
from rollstream.metric_values import MetricValues
from rollstream.producers.rewards.pool import RewardVerdict
from rollstream.producers.rollout.judging import Finish, attempt_key, trajectory_of
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.turn_driver import DriverScope, RolloutParts
from rollstream.producers.tasks.base import Reply, Task, turns_of
from rollstream.streams.records import Trajectory

log = logging.getLogger(__name__)


def open_dialogue(parts: RolloutParts, task: Task, scope: DriverScope) -> "Dialogue":
    del task
    return Dialogue(parts, retries=scope.task.retries, turns_max=scope.task.turns_max)


@dataclass(slots=True)
class Dialogue(SingleTurn):
    """A trajectory is `parked` from the end of its turn, if the environment may reply, until the
    reply or the reward is there.
    """

    hold: bool = True
    retries: int = 0
    """How often an environment that failed is asked again (`task.retries`)."""
    turns_max: int | None = None
    retried: int = 0
    _asked_s: dict[str, float] = field(default_factory=dict[str, float])
    """Since when each trajectory waits for a reply."""

    def end_turn(self, running: RunningTrajectory, finish: Finish) -> None:
        """Asks the environment if the turn ended by `stop`."""
        # An answer that reached a limit is complete.
        if finish != "stop":
            SingleTurn.end_turn(self, running, finish)
            return
        self.parked[running.assignment.trajectory] = running
        self._ask(running)

    def _ask(self, running: RunningTrajectory) -> None:
        self._asked_s[running.assignment.trajectory] = self.parts.clock()
        reference, turns = running.assignment.reference, turns_of(*running.content())
        rewards = self.parts.judging.rewards
        rewards.submit_turn(attempt_key(running), reference, running.environment, turns)

    def poll(self) -> list[Trajectory]:
        judging, records = self.parts.judging, list[Trajectory | None]()
        for key, outcome in judging.rewards.poll():
            trajectory = trajectory_of(key)
            running = self.parked.get(trajectory)
            if trajectory in self._asked_s and running is not None and key == attempt_key(running):
                waited_s = self.parts.clock() - self._asked_s.pop(trajectory)
                running.waiting_s = (running.waiting_s or 0.0) + max(0.0, waited_s)
                records.append(self._answered(running, outcome))
            else:
                records.append(judging.settle(key, outcome))
        records += judging.take_unscored()
        ended = [record for record in records if record is not None]
        for record in ended:
            if self.parked.pop(record.trajectory, None) is not None:
                self.parts.engine.abort(record.trajectory)
        return ended

    def _answered(
        self, running: RunningTrajectory, outcome: RewardVerdict | Reply
    ) -> Trajectory | None:
        if isinstance(outcome, RewardVerdict):
            return self._failed(running, f"environment: {outcome.reason}")
        judging, context_max = self.parts.judging, self.parts.settings.context_max
        if not outcome.tokens:  # the dialogue is over
            running.final_state = outcome.state
            judging.judge(running, "stop")
            return None
        if self.turns_max is not None and running.turn_count() >= self.turns_max:
            reason = f"environment: turns_max of {self.turns_max} reached"
            return judging.dead_record(running, reason)
        # Cut the reply here, as the engine does: it keeps only what fits its context. Otherwise the
        # record would hold tokens that no engine saw, and a resumed attempt would end differently.
        reply = np.array(outcome.tokens, np.uint32)[: context_max - running.length]
        running.extend_environment(reply, outcome.state)
        if running.length >= context_max:
            judging.judge(running, "length")
            return None
        trajectory = running.assignment.trajectory
        if running.leaving:
            self._hand_over(trajectory)
            return None
        try:
            self.parts.engine.append(trajectory, reply)
        except EngineRefused as error:  # the environment's error ends one sample
            return judging.dead_record(running, f"environment: {error}")
        self.running[trajectory] = self.parked.pop(trajectory)
        return None

    def _failed(self, running: RunningTrajectory, reason: str) -> Trajectory | None:
        if len(running.failures) >= self.retries:
            return self.parts.judging.dead_record(running, reason)
        log.info("%s asks its environment again: %s", running.assignment.trajectory, reason)
        self.retried += 1
        # Earlier failures are recorded with the trajectory, however it ends.
        running.failures += (reason,)
        self._ask(running)
        return None

    def drop(self, trajectory: str) -> None:
        self._cancel(trajectory)
        SingleTurn.drop(self, trajectory)

    def _cancel(self, trajectory: str) -> None:
        if self._asked_s.pop(trajectory, None) is not None:
            self.parts.judging.rewards.cancel(attempt_key(self.parked[trajectory]))

    def leave(self, trajectory: str) -> None:
        if trajectory not in self.parked:
            SingleTurn.leave(self, trajectory)

    def leave_all(self) -> None:
        for trajectory in [name for name in self.parked if name in self._asked_s]:
            self._cancel(trajectory)
            self._hand_over(trajectory)
        SingleTurn.leave_all(self)

    def _hand_over(self, trajectory: str) -> None:
        self.parts.engine.abort(trajectory)
        self.parts.publisher.give_up([self.parked.pop(trajectory)])

    @property
    def awaited(self) -> int:
        return len(self._asked_s) + len(self.parts.judging)

    def open_max(self, room: int) -> int:
        return max(self.parts.settings.episodes_max, room)

    @property
    def parked_max(self) -> int:
        return max(0, self.parts.settings.episodes_max - self.parts.settings.slots)

    def metric_values(self) -> MetricValues:
        return {"rollout_replies_retried_total": self.retried}
