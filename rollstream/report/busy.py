"""Incremental union of time intervals, e.g. of the times in which a rollout was generating."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class BusyIntervals:
    """Disjoint intervals in order; gaps of up to `joined_s` seconds are closed."""

    joined_s: float = 0.0
    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])

    def add(self, start_s: float, end_s: float) -> None:
        """Add `[start_s, end_s]`; memory grows with the gaps, not with the added intervals."""
        first = bisect_left(self.ends, start_s - self.joined_s)
        last = bisect_right(self.starts, end_s + self.joined_s)
        if first < last:
            start_s = min(start_s, self.starts[first])
            end_s = max(end_s, self.ends[last - 1])
        self.starts[first:last] = [start_s]
        self.ends[first:last] = [end_s]

    def within(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Yields the intervals' parts inside `[start_s, end_s]`."""
        for index in range(bisect_right(self.ends, start_s), len(self.starts)):
            if self.starts[index] >= end_s:
                return
            yield max(start_s, self.starts[index]), min(end_s, self.ends[index])

    def total_s(self) -> float:
        """Returns the covered seconds."""
        return sum(self.ends) - sum(self.starts)
