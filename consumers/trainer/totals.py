"""Sums over the steps that one term of the trainer recorded in the ledger.

A step that is repeated after a crash is in the ledger already and changes no sum, so the sums of
all terms together are those of the ledger.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.streams.admissible import REFUSAL_KINDS
from rollstream.metric_values import LAG_BUCKETS, SECONDS_BUCKETS, MetricValues, MetricHistogram
from rollstream.streams.records import StepDone

OUTCOMES = ("trained", "filtered", "expired", "dead")
REFUSED_COUNTS = {kind: f"refused_{kind}" for kind in REFUSAL_KINDS}
"""Kind of refusal → name of its count in a `StepDone`."""


@dataclass(slots=True)
class TrainerTotals:
    """Written by the publisher's thread, read by any thread. `last` holds the newest step's own
    metrics.
    """

    steps: int = 0
    repeated: int = 0
    sums: Counter[str] = field(default_factory=Counter[str])
    seconds: dict[str, float] = field(default_factory=lambda: {"wait_s": 0.0, "busy_s": 0.0})
    outcomes: Counter[str] = field(default_factory=Counter[str])
    lags: MetricHistogram = field(default_factory=lambda: MetricHistogram(LAG_BUCKETS))
    step_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))
    publish_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))
    last: Mapping[str, float] = field(default_factory=dict[str, float])

    def add(
        self,
        done: StepDone,
        lags: Mapping[int, int],
        outcomes: Mapping[str, int],
        publish_s: float,
    ) -> None:
        """Add a step whose `StepDone` was appended."""
        self.steps += 1
        self.sums["tokens"] += int(done.metrics.get("tokens_trained", 0.0))
        for name in ("masked_tokens", "trained", "dropped", *REFUSED_COUNTS.values()):
            self.sums[name] += done.counts.get(name, 0)
        for name in self.seconds:
            self.seconds[name] += done.metrics.get(name, 0.0)
        self.outcomes.update(outcomes)
        for lag, tokens in lags.items():
            self.lags.add(lag, tokens)
        self.step_s.add(done.metrics.get("seconds", 0.0))
        self.publish_s.add(publish_s)
        self.last = dict(done.metrics)

    def figures(self) -> MetricValues:
        return {
            "trainer_steps_total": self.steps,
            "trainer_steps_repeated_total": self.repeated,
            "trainer_tokens_trained_total": self.sums["tokens"],
            "trainer_tokens_masked_total": self.sums["masked_tokens"],
            "trainer_samples_trained_total": self.sums["trained"],
            "trainer_samples_dropped_total": self.sums["dropped"],
            "trainer_refused_total": {kind: self.sums[name] for kind, name in REFUSED_COUNTS.items()},
            "trainer_groups_total": {name: self.outcomes[name] for name in OUTCOMES},
            "trainer_wait_seconds_total": self.seconds["wait_s"],
            "trainer_busy_seconds_total": self.seconds["busy_s"],
            "trainer_step_seconds": self.step_s,
            "trainer_publish_seconds": self.publish_s,
            "trainer_last": self.last,
            "lag_steps": self.lags,
        }
