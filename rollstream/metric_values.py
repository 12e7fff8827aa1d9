"""A role's metrics: values by name (docs/reference/metrics.md).

The HTTP endpoint calls `metric_values()` from another thread at any moment: it only reads, never
waits for work, and copies values that change. Counts of one event change under one lock, or are
published as a whole: a scrape shows all of the event or nothing.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

# Bounds of the histograms of durations, in seconds.
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# Bounds of the histograms of lag, in steps.
LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class MetricHistogram:
    """A value counts in the bucket of the smallest of the ascending `bounds` that is not below it,
    or in a last one above all. One thread adds, any thread reads: `state` is replaced at once.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.state: tuple[tuple[int, ...], float] = ((0,) * (len(self.bounds) + 1), 0.0)
        """Counts of each bucket alone, and the sum. Prometheus expects running totals, which the
        endpoint computes.
        """

    def add(self, value: float, times: int = 1) -> None:
        counts, total = self.state
        at = bisect_left(self.bounds, value)
        self.state = (
            (*counts[:at], counts[at] + times, *counts[at + 1 :]),
            total + value * times,
        )

    def counts(self) -> tuple[int, ...]:
        """Returns the counts of each bucket alone."""
        return self.state[0]

    @property
    def sum(self) -> float:
        return self.state[1]

    def copy(self) -> "MetricHistogram":
        copied = MetricHistogram(self.bounds)
        copied.state = self.state
        return copied


# A metric's value: a number or a histogram, or several of them by the value of its one label.
MetricValue: TypeAlias = (
    float | MetricHistogram | Mapping[str, float] | Mapping[str, MetricHistogram]
)
# Values by the metric's name.
MetricValues: TypeAlias = Mapping[str, MetricValue]


@runtime_checkable
class ProvidesMetrics(Protocol):
    """Not every bus has metrics, so its user checks this by `isinstance`."""

    def metric_values(self) -> MetricValues:
        """Any thread may call it."""
        ...
