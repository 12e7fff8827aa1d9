"""A set of integers stored as intervals. Groups end nearly in order, so the intervals are few."""

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True)
class IntervalSet:
    """Memory grows with the number of gaps, not with the number of integers."""

    starts: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    """Interval i holds the numbers `starts[i] ≤ n < ends[i]`; no two intervals touch."""

    def add(self, number: int) -> bool:
        """Add the number; returns True if the set did not hold it."""
        after = bisect_right(self.starts, number)
        if after and number < self.ends[after - 1]:
            return False
        joins_left = after > 0 and self.ends[after - 1] == number
        joins_right = after < len(self.starts) and self.starts[after] == number + 1
        if joins_left and joins_right:
            self.ends[after - 1] = self.ends[after]
            del self.starts[after], self.ends[after]
        elif joins_left:
            self.ends[after - 1] = number + 1
        elif joins_right:
            self.starts[after] = number
        else:
            self.starts.insert(after, number)
            self.ends.insert(after, number + 1)
        return True

    def __contains__(self, number: int) -> bool:
        after = bisect_right(self.starts, number)
        return after > 0 and number < self.ends[after - 1]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.starts)
