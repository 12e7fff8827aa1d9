"""How fast versions come out and tokens are generated, as measured, and what an answer that starts
now on the newest version can be in that time. Pure but for `Steps`, a fold over what was seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MEMORY = 4  # steps that the measured time follows
WAITS = 1  # a finished answer waits for its step, in steps


@dataclass(slots=True)
class Steps:
    """Seconds of a step, smoothed; None until two versions were seen to come out. What was out
    before anybody looked says nothing.
    """

    lasts_s: float | None = None
    _number: int | None = None
    _since_s: float | None = None

    def saw(self, number: int, now_s: float) -> None:
        """The newest version at this moment; called often, it knows when each came."""
        if self._number is not None and number > self._number:
            if self._since_s is not None:
                new_s = (now_s - self._since_s) / (number - self._number)
                old_s = new_s if self.lasts_s is None else self.lasts_s
                self.lasts_s = old_s + (new_s - old_s) / MEMORY
            self._since_s = now_s
        self._number = number


@dataclass(frozen=True, slots=True)
class Budget:
    """What starts on the newest version is trained if it ends within `max_lag` steps of `step_s`;
    a token takes it `token_s`.
    """

    max_lag: int
    step_s: float
    token_s: float

    def covers(self, tokens: float) -> bool:
        """Whether an answer of so many tokens is there in time for the last step that may train
        it.
        """
        return tokens * self.token_s <= (self.max_lag - WAITS) * self.step_s


def budget_of(
    max_lag: int | None, step_s: float | None, tokens_per_s: Sequence[float]
) -> Budget | None:
    """None while something was not measured, or nothing is ever too old; `tokens_per_s` of one
    request, by rollout, 0 where it is unknown.
    """
    known = [speed for speed in tokens_per_s if speed > 0]
    if max_lag is None or not step_s or not known:
        return None
    return Budget(max_lag, step_s, 1 / median(known))
