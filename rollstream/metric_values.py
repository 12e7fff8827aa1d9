"""Defines how a running role offers its metrics: as plain numbers under documented names.

A role counts while it works; the metrics server reads the counts at any moment from another thread.
So a role's `metric_values()` only reads, never waits, and copies values that the role may change
meanwhile. Names, units and meanings are those of `docs/reference/metrics.md`, without the prefix.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class MetricHistogram:
    """Counts values by the smallest of `bounds` that they do not exceed, and values above all
    bounds. One thread adds; any thread reads.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def counts(self) -> tuple[int, ...]:
        """Returns the number of values per bucket, not accumulated; the last bucket counts values
        above all bounds.
        """
        return tuple(self._counts)


MetricValue: TypeAlias = float | Mapping[str, float] | MetricHistogram
"""A metric's value is a number, numbers by the value of its one label, or a histogram."""
MetricValues: TypeAlias = Mapping[str, MetricValue]


@runtime_checkable
class ProvidesMetrics(Protocol):
    def metric_values(self) -> MetricValues: ...
