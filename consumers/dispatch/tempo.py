"""The measured seconds per step and per token, and the length of an answer that still fits when it
starts now on the newest version. Pure except for `StepDuration`, a fold over observations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

STEPS_SMOOTHED = 4  # steps over which the measured time is smoothed
WAITING_STEPS = 1  # steps that a finished answer waits to be trained


@dataclass(slots=True)
class StepDuration:
    """Seconds per step, smoothed; None until two new versions were observed. The time before the
    first observation is not counted.
    """

    lasts_s: float | None = None
    _number: int | None = None
    _since_s: float | None = None

    def saw(self, number: int, now_s: float) -> None:
        """Record the newest version number at this moment. Must be called often, so that the time
        of each new version is known.
        """
        if self._number is not None and number > self._number:
            if self._since_s is not None:
                new_s = (now_s - self._since_s) / (number - self._number)
                old_s = new_s if self.lasts_s is None else self.lasts_s
                self.lasts_s = old_s + (new_s - old_s) / STEPS_SMOOTHED
            self._since_s = now_s
        self._number = number


@dataclass(frozen=True, slots=True)
class LagBudget:
    """An answer that starts on the newest version is trained if it ends within `max_lag` steps of
    `step_s` seconds; a token takes `token_s` seconds.
    """

    max_lag: int
    step_s: float
    token_s: float

    def covers(self, tokens: float) -> bool:
        """Whether an answer of this many tokens ends in time for the last step that may train
        it.
        """
        return tokens * self.token_s <= (self.max_lag - WAITING_STEPS) * self.step_s


def lag_budget(
    max_lag: int | None, step_s: float | None, tokens_per_s: Sequence[float]
) -> LagBudget | None:
    """The budget; None while a quantity is not measured, or without a lag bound. `tokens_per_s` is
    the speed of one request by rollout, 0 where it is unknown.
    """
    known = [speed for speed in tokens_per_s if speed > 0]
    if max_lag is None or not step_s or not known:
        return None
    return LagBudget(max_lag, step_s, 1 / median(known))
