"""Scores finished trajectories under the run's reference policy, outside the trainer, for
`trainer.reference_by = "score"`.

The reference follows from the trajectory alone, by the newest version that emitted one of its
tokens, and each trajectory is computed alone: a scorer that repeats the work of a killed one gives
the same numbers on the same hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollstream.consumers.objective_settings import named_version
from rollstream.consumers.objectives.policies.other_policies import FrozenPolicy
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.streams.admissible import LOGPROB_MIN
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Floats


@dataclass(slots=True)
class ReferenceScorer:
    """Scores under the reference called `name` (`trainer.reference`). `open_policy` makes it, with
    version 0 if it is a version; `believed` returns the number of the highest believed version.
    """

    name: str
    open_policy: Callable[[], FrozenPolicy]
    believed: Callable[[], int]
    _policy: FrozenPolicy = field(init=False)
    _highest: int = 0

    def __post_init__(self) -> None:
        self._policy = self.open_policy()

    def is_ready(self, record: Trajectory) -> bool:
        number = self._wanted(record)
        # A version emits before it is believed, and another term may still publish that number.
        if number is not None and number > self._highest:
            self._highest = self.believed()
        return number is None or number <= self._highest

    def score(self, record: Trajectory) -> Floats:
        """Returns log-probabilities [G] of the generated tokens; 0 for abandoned ones. The record
        `is_ready`. Raises `ConfigurationError` if its reference is no longer stored, `DecodeError`
        if no model can score it.
        """
        sample = sample_of(record, 0.0)
        number = self._wanted(record)
        if number == 0 and self._policy.version:
            self._policy = self.open_policy()
        if number is not None:
            self._policy.follow(_newest(record), None)
        logprobs = np.zeros(len(record.logprobs), np.float32)
        logprobs[sample.mask] = self._policy.score_alone(sample).float().cpu().numpy()
        return np.maximum(logprobs, np.float32(LOGPROB_MIN))  # NaN stays NaN

    def _wanted(self, record: Trajectory) -> int | None:
        return named_version(self.name, _newest(record))


def _newest(record: Trajectory) -> int:
    return max((span.version.number for span in record.spans), default=0)
