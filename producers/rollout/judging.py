"""What happens to a turn that ended: the environment answers it, or the whole answer is judged.

Both are the task's own code and run in the reward pool; whatever it does there ends as a reply, a
reward or a death with a reason, one per trajectory (invariant 1).
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


@dataclass(frozen=True, slots=True)
class Continued:
    """The environment answered: these tokens are appended, and the trajectory generates on after
    them.
    """

    trajectory: str
    tokens: Tokens


@dataclass(slots=True)
class Judging:
    """Trajectories between a turn's end and what follows from it. With `dialogue` the task has an
    environment.
    """

    rewards: RewardPool
    dialogue: bool
    term: int
    newest: Callable[[], Version]
    clock: Callable[[], float] = time.time
    _judged: dict[str, tuple[Growing, Finish]] = field(
        default_factory=dict[str, tuple[Growing, Finish]]
    )
    _asked: dict[str, Growing] = field(default_factory=dict[str, Growing])

    def __len__(self) -> int:
        return len(self._judged) + len(self._asked)

    def has(self, trajectory: str) -> bool:
        """Its turn is over and nothing is decided yet: a partial now would be resumed
        past its end.
        """
        return trajectory in self._asked or trajectory in self._judged

    def ended(self, growing: Growing, finish: Finish) -> None:
        """A turn ended. Only a `stop` is a turn that an environment answers."""
        if self.dialogue and finish == "stop":
            self._asked[growing.order.trajectory] = growing
            reference, turns = growing.order.reference, turns_of(*growing.content())
            state = growing.environment
            self.rewards.submit_turn(growing.order.trajectory, reference, state, turns)
        else:
            self._judge(growing, finish)

    def forget(self, trajectory: str) -> None:
        """It was released; its verdict will find nobody."""
        self._judged.pop(trajectory, None)
        self._asked.pop(trajectory, None)

    def poll(self) -> list[Trajectory | Continued]:
        """What was decided since the last call: finished trajectories, and those that go on."""
        decided: list[Trajectory | Continued] = []
        for trajectory, outcome in self.rewards.poll():
            if trajectory in self._asked:
                decided += self._answered(self._asked.pop(trajectory), outcome)
            elif trajectory in self._judged:
                decided.append(self._finished(*self._judged.pop(trajectory), outcome))
        return decided

    def died(self, growing: Growing, reason: str) -> Trajectory:
        """A failure is a completion that says so (invariant 2)."""
        return growing.finished(self.term, "dead", self.clock(), self.newest(), reason=reason)

    def _judge(self, growing: Growing, finish: Finish) -> None:
        self._judged[growing.order.trajectory] = (growing, finish)
        turns = turns_of(*growing.content())
        self.rewards.submit(growing.order.trajectory, growing.order.reference, turns)

    def _answered(self, growing: Growing, outcome: Verdict | Reply) -> list[Trajectory | Continued]:
        if isinstance(outcome, Verdict):
            return [self.died(growing, f"environment: {outcome.reason}")]
        if not outcome.tokens:  # the dialogue is over
            growing.environment = outcome.state
            self._judge(growing, "stop")
            return []
        tokens = np.array(outcome.tokens, np.uint32)
        growing.extend_environment(tokens, outcome.state)
        return [Continued(growing.order.trajectory, tokens)]

    def _finished(self, growing: Growing, finish: Finish, outcome: Verdict | Reply) -> Trajectory:
        assert isinstance(outcome, Verdict), "a reply to what was to be judged"
        if outcome.dead:
            return self.died(growing, f"reward: {outcome.reason}")
        scores = dict(outcome.scores)
        return growing.finished(
            self.term, finish, self.clock(), self.newest(), outcome.reward, scores
        )
