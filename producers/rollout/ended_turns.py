"""Gets what follows the end of a trajectory's turn: in a dialogue the environment's reply, after
which the trajectory continues, else the reward of the whole answer, which finishes it.

Both come from the task's code in the reward pool's processes. Each submission to the pool has
exactly one outcome: a reply, a reward or the reason of a failure (invariant 1). After a failure the
environment is asked again as often as `task.retries` allows; then the failure ends the trajectory.
An outcome belongs to the attempt that asked for it, and is ignored if that attempt has been dropped
meanwhile. With late rewards the answer is finished without a reward; a scorer adds it later as an
annotation.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rollstream.producers.rewards.pool import RewardPool, RewardVerdict
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.tasks.base import Reply, turns_of
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Tokens, Version

log = logging.getLogger(__name__)

Finish = Literal["stop", "length"]
"""How a turn ended: by a stop token, or at a limit of its length."""

_ATTEMPT_SEPARATOR = "#"
CONTEXT_MAX = 1 << 40  # tokens; the default where the engine's context is not known


@dataclass(frozen=True, slots=True)
class ContinuedTurn:
    """The environment's reply to a turn: the caller appends `tokens` in the engine, and the engine
    generates the next turn.
    """

    trajectory: str
    tokens: Tokens


@dataclass(slots=True)
class EndedTurns:
    """Holds the trajectories whose turn has ended, from `submit` until `poll` returns what follows:
    the finished record or the environment's reply.
    """

    rewards: RewardPool
    dialogue: bool
    """Whether the task has an environment that replies to turns."""
    term: int
    """The rollout's term, for the records."""
    newest: Callable[[], Version]
    """Returns the newest version that the rollout knows, for the lag at finish."""
    clock: Callable[[], float] = time.time
    late: bool = False
    """Whether rewards come later, from a scorer."""
    context_max: int = CONTEXT_MAX
    """The engine's context, in tokens."""
    retries: int = 0
    """How often a dialogue asks again after its environment failed (`task.retries`)."""
    turns_max: int | None = None
    """Most turns of the model in a dialogue (`task.turns_max`)."""
    retried: int = 0
    """Number of replies that were asked for again."""
    _awaiting_reward: dict[str, tuple[RunningTrajectory, Finish]] = field(
        default_factory=dict[str, tuple[RunningTrajectory, Finish]]
    )
    _awaiting_reply: dict[str, tuple[RunningTrajectory, float]] = field(
        default_factory=dict[str, tuple[RunningTrajectory, float]]
    )
    """By trajectory, with the time since which it waits."""
    _awaiting_scorer: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """Records that are finished without a reward, until the next `poll` returns them."""

    def __len__(self) -> int:
        return len(self._awaiting_reward) + len(self._awaiting_reply) + len(self._awaiting_scorer)

    def holds(self, trajectory: str) -> bool:
        """Whether the trajectory's turn has ended and its outcome is not decided yet."""
        return any(
            trajectory in waiting
            for waiting in (self._awaiting_reply, self._awaiting_reward, self._awaiting_scorer)
        )

    def submit(self, running: RunningTrajectory, finish: Finish) -> None:
        """Ask for the outcome of a turn that ended by `finish`. An environment is asked only if the
        turn ended by `stop`. Without an environment, or after `length`, the answer is complete and
        its reward is asked for.
        """
        self.drop(running.assignment.trajectory)  # of an earlier attempt
        running.end_turn()
        if self.dialogue and finish == "stop":
            self._ask(running)
        else:
            self.judge(running, finish)

    def awaits_reply(self, trajectory: str) -> bool:
        """Whether the trajectory waits for its environment's reply."""
        return trajectory in self._awaiting_reply

    def drop(self, trajectory: str) -> None:
        """Drop the trajectory, because it was released or assigned again. Its reply is cancelled,
        and an outcome that still arrives for it is ignored.
        """
        if trajectory in self._awaiting_reply:
            self.rewards.cancel(_attempt_key(self._awaiting_reply[trajectory][0]))
        for waiting in (self._awaiting_reward, self._awaiting_reply, self._awaiting_scorer):
            waiting.pop(trajectory, None)

    def drop_all(self) -> None:
        """Drop all trajectories; later outcomes are ignored."""
        for trajectory in list(self._awaiting_reply):
            self.drop(trajectory)
        for waiting in (self._awaiting_reward, self._awaiting_scorer):
            waiting.clear()

    def poll(self) -> list[Trajectory | ContinuedTurn]:
        """Returns what was decided since the last call: the records of finished trajectories, and
        the replies to those that continue.
        """
        decided: list[Trajectory | ContinuedTurn] = []
        for key, outcome in self.rewards.poll():
            trajectory = key.rpartition(_ATTEMPT_SEPARATOR)[0]
            awaiting_reply, awaiting_reward = (
                self._awaiting_reply.get(trajectory),
                self._awaiting_reward.get(trajectory),
            )
            if awaiting_reply is not None and key == _attempt_key(awaiting_reply[0]):
                del self._awaiting_reply[trajectory]
                running, since_s = awaiting_reply
                running.waiting_s = (running.waiting_s or 0.0) + max(0.0, self.clock() - since_s)
                decided += self._answered(running, outcome)
            elif awaiting_reward is not None and key == _attempt_key(awaiting_reward[0]):
                del self._awaiting_reward[trajectory]
                decided.append(self._finished(*awaiting_reward, outcome))
        decided += self._awaiting_scorer.values()
        self._awaiting_scorer.clear()
        return decided

    def dead_record(self, running: RunningTrajectory, reason: str) -> Trajectory:
        """Returns the completion that records a failure, with its reason (invariant 2)."""
        return running.to_record(self.term, "dead", self.clock(), self.newest(), reason=reason)

    def rewarded_record(
        self,
        running: RunningTrajectory,
        finish: Finish,
        reward: float,
        scores: Mapping[str, float],
    ) -> Trajectory:
        """Returns the completion of an episode whose program gave the reward."""
        now, newest = self.clock(), self.newest()
        return running.to_record(self.term, finish, now, newest, reward, dict(scores))

    def _ask(self, running: RunningTrajectory) -> None:
        """Ask for the environment's reply to the trajectory's last turn."""
        self._awaiting_reply[running.assignment.trajectory] = running, self.clock()
        reference, turns = running.assignment.reference, turns_of(*running.content())
        self.rewards.submit_turn(_attempt_key(running), reference, running.environment, turns)

    def _failed(self, running: RunningTrajectory, reason: str) -> list[Trajectory | ContinuedTurn]:
        """Ask again after a failure of the environment, or return the dead record. The earlier
        failures of the trajectory are recorded with it, however it ends.
        """
        if len(running.failures) >= self.retries:
            return [self.dead_record(running, reason)]
        log.info("%s asks its environment again: %s", running.assignment.trajectory, reason)
        self.retried += 1
        running.failures += (reason,)
        self._ask(running)
        return []

    def judge(self, running: RunningTrajectory, finish: Finish) -> None:
        """Ask for the reward of the complete answer, or finish it without one if rewards come
        late.
        """
        trajectory = running.assignment.trajectory
        if self.late:
            record = running.to_record(self.term, finish, self.clock(), self.newest())
            self._awaiting_scorer[trajectory] = record
            return
        self._awaiting_reward[trajectory] = (running, finish)
        turns = turns_of(*running.judged_content())
        self.rewards.submit(_attempt_key(running), running.assignment.reference, turns)

    def _answered(
        self, running: RunningTrajectory, outcome: RewardVerdict | Reply
    ) -> list[Trajectory | ContinuedTurn]:
        """Returns what follows from the environment's outcome: its reply, or a dead record. If it
        failed and is asked again, return []; if the dialogue is over or the context is full, ask
        for the reward and return [].
        """
        if isinstance(outcome, RewardVerdict):
            return self._failed(running, f"environment: {outcome.reason}")
        if not outcome.tokens:  # the dialogue is over
            running.final_state = outcome.state
            self.judge(running, "stop")
            return []
        if self.turns_max is not None and running.turn_count() >= self.turns_max:
            reason = f"environment: turns_max of {self.turns_max} reached"
            return [self.dead_record(running, reason)]
        # Cut the reply here, as the engine does: it keeps only what fits its context. Otherwise the
        # record would hold tokens that no engine saw, and a resumed attempt would end differently.
        tokens = np.array(outcome.tokens, np.uint32)[: self.context_max - running.length]
        running.extend_environment(tokens, outcome.state)
        if running.length >= self.context_max:
            self.judge(running, "length")
            return []
        return [ContinuedTurn(running.assignment.trajectory, tokens)]

    def _finished(
        self, running: RunningTrajectory, finish: Finish, outcome: RewardVerdict | Reply
    ) -> Trajectory:
        """Returns the record with the reward, or a dead one if judging failed."""
        assert isinstance(outcome, RewardVerdict), (
            "the reward pool replied instead of giving a reward"
        )
        if outcome.dead:
            return self.dead_record(running, f"reward: {outcome.reason}")
        scores = dict(outcome.scores)
        return running.to_record(
            self.term, finish, self.clock(), self.newest(), outcome.reward, scores
        )


def _attempt_key(running: RunningTrajectory) -> str:
    """Returns the key under which the reward pool is asked for this attempt."""
    return f"{running.assignment.trajectory}{_ATTEMPT_SEPARATOR}{running.assignment.attempt}"
