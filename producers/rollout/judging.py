"""Gets the rewards of complete answers: each judged answer has exactly one outcome, a reward or the
reason why it has none (invariant 1); that of a dropped attempt is ignored.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollstream.producers.rewards.pool import RewardPool, RewardVerdict
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.tasks.base import Reply
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Version

Finish = Literal["stop", "length"]
"""How a turn ended: by a stop token, or at a limit of its length."""

_ATTEMPT_SEPARATOR = "#"


@dataclass(slots=True)
class Judging:
    rewards: RewardPool
    term: int
    newest: Callable[[], Version]
    """Returns the newest version that the rollout knows, for the lag at finish."""
    clock: Callable[[], float] = time.time
    late: bool = False
    """Whether rewards come later, from a scorer."""
    _waiting: dict[str, tuple[RunningTrajectory, Finish]] = field(
        default_factory=dict[str, tuple[RunningTrajectory, Finish]]
    )
    _unscored: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """Records that are finished without a reward, until the next `take_unscored`."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unscored)

    def judge(self, running: RunningTrajectory, finish: Finish) -> None:
        """Requests the reward, or with late rewards finishes the answer without one. Replaces an
        earlier attempt.
        """
        trajectory = running.assignment.trajectory
        if self.late:
            record = running.to_record(self.term, finish, self.clock(), self.newest())
            self._unscored[trajectory] = record
            return
        self._waiting[trajectory] = (running, finish)
        turns = running.judged_turns()
        self.rewards.submit(attempt_key(running), running.assignment.reference, turns)

    def drop(self, trajectory: str) -> None:
        """Remove the trajectory, which was released or assigned again; its reward is ignored."""
        self._waiting.pop(trajectory, None)
        self._unscored.pop(trajectory, None)

    def drop_all(self) -> None:
        self._waiting.clear()
        self._unscored.clear()

    def poll(self) -> list[Trajectory]:
        settled = (self.settle(key, outcome) for key, outcome in self.rewards.poll())
        return [record for record in settled if record is not None] + self.take_unscored()

    def settle(self, key: str, outcome: RewardVerdict | Reply) -> Trajectory | None:
        """Returns the record with the reward, or dead if judging failed. None for a dropped
        attempt.
        """
        trajectory = trajectory_of(key)
        waiting = self._waiting.get(trajectory)
        if waiting is None or key != attempt_key(waiting[0]):
            return None
        del self._waiting[trajectory]
        running, finish = waiting
        assert isinstance(outcome, RewardVerdict), (
            "the reward pool replied instead of giving a reward"
        )
        if outcome.dead:
            return self.dead_record(running, f"reward: {outcome.reason}")
        return self.rewarded_record(running, finish, outcome.reward, outcome.scores)

    def take_unscored(self) -> list[Trajectory]:
        records = list(self._unscored.values())
        self._unscored.clear()
        return records

    def dead_record(self, running: RunningTrajectory, reason: str) -> Trajectory:
        """Returns the completion of a failure, with its reason (invariant 2)."""
        return running.to_record(self.term, "dead", self.clock(), self.newest(), reason=reason)

    def rewarded_record(
        self,
        running: RunningTrajectory,
        finish: Finish,
        reward: float,
        scores: Mapping[str, float],
    ) -> Trajectory:
        now, newest = self.clock(), self.newest()
        return running.to_record(self.term, finish, now, newest, reward, dict(scores))


def attempt_key(running: RunningTrajectory) -> str:
    return f"{running.assignment.trajectory}{_ATTEMPT_SEPARATOR}{running.assignment.attempt}"


def trajectory_of(key: str) -> str:
    return key.rpartition(_ATTEMPT_SEPARATOR)[0]
