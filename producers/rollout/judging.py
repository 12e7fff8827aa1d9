"""What happens to a turn that ended: the environment answers it, or the whole answer is judged.

Both are the task's own code and run in the reward pool; whatever it does there ends as a reply, a
reward or a death with a reason, one per attempt at a trajectory (invariant 1). An outcome is that
of the attempt that asked: one of an earlier attempt, given up meanwhile, finds nobody. With late
rewards nothing is judged here; the answer is published as it is, and a scorer brings its reward.
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
CONTEXT_MAX = 1 << 40  # where nobody says what the engine's is


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
    environment; with `late` rewards come from a scorer.
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
        """Its turn is over and nothing is decided yet: a partial now would be resumed
        past its end.
        """
        return any(trajectory in by for by in (self._asked, self._judged, self._unjudged))

    def ended(self, growing: Growing, finish: Finish) -> None:
        """A turn ended. Only a `stop` is a turn that an environment answers."""
        self.forget(growing.order.trajectory)  # an earlier attempt, if there was one
        if self.dialogue and finish == "stop":
            self._asked[growing.order.trajectory] = growing
            reference, turns = growing.order.reference, turns_of(*growing.content())
            self.rewards.submit_turn(_key(growing), reference, growing.environment, turns)
        else:
            self._judge(growing, finish)

    def forget(self, trajectory: str) -> None:
        """It was released, or is ordered anew; a verdict on what was will find nobody."""
        for by in (self._judged, self._asked, self._unjudged):
            by.pop(trajectory, None)

    def forget_all(self) -> None:
        """Nobody is here any more to hear a verdict."""
        for by in (self._judged, self._asked, self._unjudged):
            by.clear()

    def poll(self) -> list[Trajectory | Continued]:
        """What was decided since the last call: finished trajectories, and those that go on."""
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
        """A failure is a completion that says so (invariant 2)."""
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
        # Cut where it enters: an engine keeps of a reply what its context holds, so the record
        # would hold tokens that no engine saw, and a resumed attempt would end otherwise.
        tokens = np.array(outcome.tokens, np.uint32)[: self.context_max - growing.length]
        growing.extend_environment(tokens, outcome.state)
        if growing.length >= self.context_max:
            self._judge(growing, "length")
            return []
        return [Continued(growing.order.trajectory, tokens)]

    def _finished(self, growing: Growing, finish: Finish, outcome: Verdict | Reply) -> Trajectory:
        assert isinstance(outcome, Verdict), "a reply to what was to be judged"
        if outcome.dead:
            return self.died(growing, f"reward: {outcome.reason}")
        scores = dict(outcome.scores)
        return growing.finished(
            self.term, finish, self.clock(), self.newest(), outcome.reward, scores
        )


def _key(growing: Growing) -> str:
    """What the pool knows an attempt by."""
    return f"{growing.order.trajectory}{_ATTEMPT}{growing.order.attempt}"
