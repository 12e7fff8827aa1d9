"""Decides how an ended turn continues: the environment replies to it, or the whole answer gets its
reward.

Both are the task's own code and run in the reward pool. Every attempt ends there in exactly one
reply, reward or dead-letter reason (invariant 1). An outcome belongs to the attempt that asked for
it; the outcome of an attempt that was given up meanwhile is ignored. With late rewards the answer
is published without a reward, and a scorer adds the reward as an annotation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from producers.rewards import RewardPool, Verdict
from producers.rollout.growing import Growing
from producers.tasks.base import Reply, turns_of
from streams.records import Tokens, Trajectory, Version

Finish = Literal["stop", "length"]

_ATTEMPT = "#"
CONTEXT_MAX = 1 << 40  # used where the engine's context is not known


@dataclass(frozen=True, slots=True)
class Continued:
    """The environment's reply: `tokens` are appended, and the trajectory continues to generate
    after them.
    """

    trajectory: str
    tokens: Tokens


@dataclass(slots=True)
class Judging:
    """Trajectories whose turn has ended and whose next state is not decided. `dialogue`: the task
    has an environment. `late`: rewards come from a scorer.
    """

    rewards: RewardPool
    dialogue: bool
    term: int
    newest: Callable[[], Version]
    clock: Callable[[], float] = time.time
    late: bool = False
    context_max: int = CONTEXT_MAX
    _judged: dict[str, tuple[Growing, Finish]] = field(
        default_factory=dict[str, tuple[Growing, Finish]]
    )
    _asked: dict[str, Growing] = field(default_factory=dict[str, Growing])
    _unjudged: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])

    def __len__(self) -> int:
        return len(self._judged) + len(self._asked) + len(self._unjudged)

    def has(self, trajectory: str) -> bool:
        """Whether the trajectory's turn has ended without a decision. A partial published now would
        be resumed past the turn's end.
        """
        return any(trajectory in by for by in (self._asked, self._judged, self._unjudged))

    def ended(self, growing: Growing, finish: Finish) -> None:
        """Take over a trajectory whose turn ended. An environment replies to turns that end by
        `stop` only.
        """
        self.forget(growing.order.trajectory)  # of an earlier attempt
        if self.dialogue and finish == "stop":
            self._asked[growing.order.trajectory] = growing
            reference, turns = growing.order.reference, turns_of(*growing.content())
            self.rewards.submit_turn(_key(growing), reference, growing.environment, turns)
        else:
            self._judge(growing, finish)

    def forget(self, trajectory: str) -> None:
        """Drop the trajectory: it was released or assigned again. A later outcome for it is
        ignored.
        """
        for by in (self._judged, self._asked, self._unjudged):
            by.pop(trajectory, None)

    def forget_all(self) -> None:
        """Drop all trajectories; later outcomes are ignored."""
        for by in (self._judged, self._asked, self._unjudged):
            by.clear()

    def poll(self) -> list[Trajectory | Continued]:
        """Return what was decided since the last call: finished trajectories, and turns that
        continue.
        """
        decided: list[Trajectory | Continued] = []
        for key, outcome in self.rewards.poll():
            trajectory = key.rpartition(_ATTEMPT)[0]
            asked, judged = self._asked.get(trajectory), self._judged.get(trajectory)
            if asked is not None and key == _key(asked):
                del self._asked[trajectory]
                decided += self._answered(asked, outcome)
            elif judged is not None and key == _key(judged[0]):
                del self._judged[trajectory]
                decided.append(self._finished(*judged, outcome))
        decided += self._unjudged.values()
        self._unjudged.clear()
        return decided

    def died(self, growing: Growing, reason: str) -> Trajectory:
        """The completion that records a failure (invariant 2)."""
        return growing.finished(self.term, "dead", self.clock(), self.newest(), reason=reason)

    def _judge(self, growing: Growing, finish: Finish) -> None:
        trajectory = growing.order.trajectory
        if self.late:
            record = growing.finished(self.term, finish, self.clock(), self.newest())
            self._unjudged[trajectory] = record
            return
        self._judged[trajectory] = (growing, finish)
        turns = turns_of(*growing.content())
        self.rewards.submit(_key(growing), growing.order.reference, turns)

    def _answered(self, growing: Growing, outcome: Verdict | Reply) -> list[Trajectory | Continued]:
        if isinstance(outcome, Verdict):
            return [self.died(growing, f"environment: {outcome.reason}")]
        if not outcome.tokens:  # the dialogue is over
            growing.environment = outcome.state
            self._judge(growing, "stop")
            return []
        # Cut the reply here: an engine keeps only the part that fits its context. Otherwise the
        # record would hold tokens that no engine saw, and a resumed attempt would end differently.
        tokens = np.array(outcome.tokens, np.uint32)[: self.context_max - growing.length]
        growing.extend_environment(tokens, outcome.state)
        if growing.length >= self.context_max:
            self._judge(growing, "length")
            return []
        return [Continued(growing.order.trajectory, tokens)]

    def _finished(self, growing: Growing, finish: Finish, outcome: Verdict | Reply) -> Trajectory:
        assert isinstance(outcome, Verdict), "the reward pool replied instead of giving a reward"
        if outcome.dead:
            return self.died(growing, f"reward: {outcome.reason}")
        scores = dict(outcome.scores)
        return growing.finished(
            self.term, finish, self.clock(), self.newest(), outcome.reward, scores
        )


def _key(growing: Growing) -> str:
    """The name of an attempt in the reward pool."""
    return f"{growing.order.trajectory}{_ATTEMPT}{growing.order.attempt}"
