"""Sums over finished steps, and the line of a step in the metrics file."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.metric_values import LAG_BUCKETS, SECONDS_BUCKETS, MetricHistogram, MetricValues
from rollstream.streams.admissible import REFUSAL_KINDS
from rollstream.streams.records import StepDone

OUTCOMES = ("trained", "filtered", "expired", "dead")
REFUSED_COUNTS = {kind: f"refused_{kind}" for kind in REFUSAL_KINDS}
"""Kind of refusal → name of its count in a `StepDone`."""


@dataclass(slots=True)
class TrainerTotals:
    """Sums over the steps whose `StepDone` this term appended, thread-safe; `last` has the newest
    step's own metrics.
    """

    steps: int = 0
    # A step repeated with the same bits is in the ledger already and changes no sum, so the sums of
    # all terms are those of the ledger.
    repeated: int = 0
    sums: Counter[str] = field(default_factory=Counter[str])
    seconds: dict[str, float] = field(default_factory=lambda: {"wait_s": 0.0, "busy_s": 0.0})
    outcomes: Counter[str] = field(default_factory=Counter[str])
    lags: MetricHistogram = field(default_factory=lambda: MetricHistogram(LAG_BUCKETS))
    step_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))
    publish_s: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS_BUCKETS))
    last: Mapping[str, float] = field(default_factory=dict[str, float])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        done: StepDone,
        lags: Mapping[int, int],
        outcomes: Mapping[str, int],
        publish_s: float,
    ) -> None:
        """`lags` are its trained tokens by lag, `outcomes` its groups by how they ended."""
        with self.lock:
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

    def metric_values(self) -> MetricValues:
        with self.lock:
            return self._values()

    def _values(self) -> MetricValues:
        return {
            "trainer_steps_total": self.steps,
            "trainer_steps_repeated_total": self.repeated,
            "trainer_tokens_trained_total": self.sums["tokens"],
            "trainer_tokens_masked_total": self.sums["masked_tokens"],
            "trainer_samples_trained_total": self.sums["trained"],
            "trainer_samples_dropped_total": self.sums["dropped"],
            "trainer_refused_total": {
                kind: self.sums[name] for kind, name in REFUSED_COUNTS.items()
            },
            "trainer_groups_total": {name: self.outcomes[name] for name in OUTCOMES},
            "trainer_wait_seconds_total": self.seconds["wait_s"],
            "trainer_busy_seconds_total": self.seconds["busy_s"],
            "trainer_step_seconds": self.step_s.copy(),
            "trainer_publish_seconds": self.publish_s.copy(),
            "trainer_last": self.last,
            "lag_steps": self.lags.copy(),
        }


def step_line(done: StepDone, publish_s: float | None) -> dict[str, Any]:
    """The line in `metrics/trainer.jsonl`; of several lines of a step the last (highest term) is
    valid. `publish_s` is None in a line that a later term added.
    """
    head = {"step": done.step, "term": done.version.term, "time_s": done.time_s}
    return {**head, **done.metrics, **done.counts, "publish_s": publish_s}


def missing_lines(
    recorded: Mapping[int, StepDone], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns lines that the file lacks, in the order of steps: a crash between a `StepDone` and
    its line loses the line.
    """
    there = {(line.get("step"), line.get("time_s")) for line in lines}
    return [
        step_line(done, None)
        for step, done in sorted(recorded.items())
        if (step, done.time_s) not in there
    ]
