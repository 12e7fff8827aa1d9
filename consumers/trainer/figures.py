"""What a step reports: rewards, lengths and lag of what it trained, and counts of what
it did not.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from consumers.trainer.lag import lags_of
from consumers.trainer.sample import Sample
from streams.records import Trajectory


@dataclass(slots=True)
class StepFigures:
    """Gathered over one step; `metrics` and `counts` go into its `StepDone`."""

    rewards: list[float] = field(default_factory=list[float])
    lengths: list[int] = field(default_factory=list[int])
    lag_finish: list[int] = field(default_factory=list[int])
    lag_consumed: list[int] = field(default_factory=list[int])
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])

    def taken(
        self, records: Sequence[Trajectory], samples: Sequence[Sample], counts: Mapping[str, int]
    ) -> None:
        """A group that is trained; lag at finish is the oldest span's, as the rollout knew the
        trainer's version.
        """
        self.counts.update(counts)
        self.counts["groups"] += 1
        self.counts["trained"] += len(samples)
        for sample in samples:
            self.rewards.append(sample.reward)
            self.lengths.append(len(sample.logprobs))
            self.tokens += int(np.count_nonzero(sample.mask))
        for record in records:
            if record.spans:
                oldest = min(span.version.number for span in record.spans)
                self.lag_finish.append(record.trainer_version.number - oldest)

    def consumed(self, samples: Sequence[Sample], version: int) -> None:
        """Samples handed to the learner: lag at consumption, token by token, of what is trained."""
        for sample in samples:
            lags = lags_of(sample, version)[sample.mask]
            self.lag_consumed += [int(lags.min()), int(lags.max())]

    def closed(self, ending: str, counts: Mapping[str, int]) -> None:
        """A group that ended untrained."""
        self.counts.update(counts)
        self.counts[ending] += 1

    def metrics(self) -> dict[str, float]:
        """Figures of a step that trained at least one sample."""
        return {
            "reward_mean": float(np.mean(self.rewards)),
            "accuracy": float(np.mean(np.array(self.rewards) >= 1)),
            "length_median": float(np.median(self.lengths)),
            "length_p99": float(np.quantile(self.lengths, 0.99)),
            "lag_finish_mean": float(np.mean(self.lag_finish)),
            "lag_finish_max": float(np.max(self.lag_finish)),
            "lag_consumed_mean": float(np.mean(self.lag_consumed)),
            "lag_consumed_max": float(np.max(self.lag_consumed)),
            "tokens_trained": float(self.tokens),
        }
