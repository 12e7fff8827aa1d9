"""Computes which offsets of a topic are archived, and which must come from the log. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadableFile:
    """A readable archived file: rows `first` to `last` of a partition, at local `path`. `fence`
    (term, sequence) is the one after its last row; `schema` is the format number of its columns.
    """

    path: str
    partition: int
    first: int
    last: int
    schema: int = 0
    fence: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class OffsetGap:
    """Offsets `[start, end)` of a partition that no archived file holds; with `end` None, all from
    `start` on. `fence` is the one before `start`, (0, 0) if
    unknown.
    """

    partition: int
    start: int
    end: int | None
    fence: tuple[int, int] = (0, 0)


def offset_gaps(held: Iterable[ReadableFile], partitions: Iterable[int]) -> list[OffsetGap]:
    """Returns the offsets to read from the log, by partition; the open end of each comes last."""
    by_partition: defaultdict[int, list[ReadableFile]] = defaultdict(list)
    for one in held:
        by_partition[one.partition].append(one)
    found: list[OffsetGap] = []
    for partition in sorted({*by_partition, *partitions}):
        at, fence = 0, (0, 0)
        for one in sorted(by_partition[partition], key=lambda one: one.first):
            if one.first > at:
                found.append(OffsetGap(partition, at, one.first, fence))
            at, fence = max(at, one.last + 1), one.fence
        found.append(OffsetGap(partition, at, None, fence))
    return found


def overlapping(held: Iterable[ReadableFile]) -> list[tuple[ReadableFile, ReadableFile]]:
    """Returns pairs of files with common offsets: their rows would count twice."""
    found: list[tuple[ReadableFile, ReadableFile]] = []
    before: ReadableFile | None = None
    for one in sorted(held, key=lambda one: (one.partition, one.first)):
        if before and before.partition == one.partition and one.first <= before.last:
            found.append((before, one))
        if before is None or before.partition != one.partition or one.last > before.last:
            before = one
    return found


def gaps_in_words(lost: Sequence[OffsetGap]) -> str:
    """`partition 0: 3 to 9, partition 2: 0 to 4`; lists at most five gaps."""
    shown = [f"partition {h.partition}: {h.start} to {(h.end or 0) - 1}" for h in lost[:5]]
    return ", ".join(shown) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
