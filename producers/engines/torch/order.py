"""The order of the rows of a batch, such that attention reads little padding.

Rows of similar length are neighbours: there is a region per length class, the longest first. Rows
in use are packed at the front. A row that leaves is replaced by the last row of its region, that
one by the last row of the next region, and so on. All rows grow by one token per step, so a row
rarely changes its region. This file only plans: every method returns the moves `(from, to)` that
the caller makes, in this order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RowMove = tuple[int, int]

# 48, 144, 432, …: the best of those tried on the long-tailed trace; finer classes move more rows.
CLASS_FIRST, CLASS_GROWTH = 48, 3


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Rows `[begin, end)` that attend to the columns from `column` on."""

    begin: int
    end: int
    column: int


def length_classes(context_max: int) -> tuple[int, ...]:
    """Upper bounds of all classes but the last, ascending."""
    bounds: list[int] = []
    bound = CLASS_FIRST
    while bound < context_max:
        bounds.append(bound)
        bound *= CLASS_GROWTH
    return tuple(bounds)


class RowLayout:
    """The number of rows per region; region 0 is that of the longest class. `spare` is a row
    outside of the batch for swaps.
    """

    def __init__(self, bounds: Sequence[int], spare: int) -> None:
        self.ceilings: tuple[float, ...] = (float("inf"), *reversed(bounds))
        self.counts = [0] * len(self.ceilings)
        self.spare = spare

    def region(self, length: int) -> int:
        """The region of a row of this length."""
        return max(r for r, ceiling in enumerate(self.ceilings) if length <= ceiling)

    def insert(self, region: int) -> tuple[int, list[RowMove]]:
        """Add a row to this region. Returns its index, which is free after the moves."""
        hole = sum(self.counts)
        moves: list[RowMove] = []
        for later in range(len(self.counts) - 1, region, -1):
            if self.counts[later]:
                first = sum(self.counts[:later])
                moves.append((first, hole))
                hole = first
        self.counts[region] += 1
        return hole, moves

    def remove(self, row: int) -> list[RowMove]:
        """Remove a row; the moves pack the others."""
        moves: list[RowMove] = []
        end, hole, found = 0, row, False
        for region, count in enumerate(self.counts):
            end += count
            if not found and row < end:
                found = True
                self.counts[region] -= 1
            if found and count and hole != end - 1:
                moves.append((end - 1, hole))
                hole = end - 1
        return moves

    def promote(self, row: int, region: int) -> list[RowMove]:
        """Move a row from its region to the next longer one; the moves swap it to the border
        between the two.
        """
        first = sum(self.counts[:region])
        self.counts[region] -= 1
        self.counts[region - 1] += 1
        return [] if row == first else [(row, self.spare), (first, row), (self.spare, first)]


def row_segments(
    counts: Sequence[int], columns: Sequence[int], overhead_tokens: int
) -> tuple[RowSegment, ...]:
    """The segments for attention calls; `columns` holds the first column of each region's longest
    row.

    A region is merged with the one before it when the padding that it then reads costs less than a
    call of its own.
    """
    found: list[RowSegment] = []
    begin = 0
    for count, column in zip(counts, columns, strict=True):
        if not count:
            continue
        end = begin + count
        if found and count * (column - found[-1].column) < overhead_tokens:
            last = found[-1]
            found[-1] = RowSegment(last.begin, end, min(last.column, column))
        else:
            found.append(RowSegment(begin, end, column))
        begin = end
    return tuple(found)
