"""A set of whole numbers as intervals: groups end nearly in order, so they are few."""

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True)
class NumberSet:
    """Memory grows with the gaps between its numbers, not with the numbers."""

    starts: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    """Interval i holds `starts[i] ≤ number < ends[i]`; intervals never touch."""

    def add(self, number: int) -> bool:
        """True if the number is new."""
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
