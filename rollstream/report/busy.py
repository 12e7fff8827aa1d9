"""Union of intervals, kept merged while they come: when a rollout had anything to do."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Busy:
    """Disjoint intervals in order; `joined_s` closes gaps that are too short to be seen."""

    joined_s: float = 0.0
    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])

    def add(self, start_s: float, end_s: float) -> None:
        """Unite with `[start_s, end_s]`; memory grows with the gaps, not with the intervals."""
        first = bisect_left(self.ends, start_s - self.joined_s)
        last = bisect_right(self.starts, end_s + self.joined_s)
        if first < last:
            start_s = min(start_s, self.starts[first])
            end_s = max(end_s, self.ends[last - 1])
        self.starts[first:last] = [start_s]
        self.ends[first:last] = [end_s]

    def within(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """The parts that lie in `[start_s, end_s]`."""
        for index in range(bisect_right(self.ends, start_s), len(self.starts)):
            if self.starts[index] >= end_s:
                return
            yield max(start_s, self.starts[index]), min(end_s, self.ends[index])

    def total_s(self) -> float:
        """Seconds covered."""
        return sum(self.ends) - sum(self.starts)
