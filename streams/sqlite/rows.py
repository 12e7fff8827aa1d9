"""Packs consecutive records of one append into rows, and unpacks them again.

A row of one record holds its key and value as they are, and its `sizes` is NULL. A row of several
holds their keys joined and their values joined; `sizes` holds, as u32 little-endian, the lengths of
all keys, then of all values. Reading one row of 64 records takes half the time of 64 rows. Values
are copied out, so keeping one record does not keep the others in memory. A tombstone always has a
row of its own.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, repeat

from rollstream.streams.bus import AppendEntry, Message

ROW_BYTES = 64 << 10  # of several records: bounds what a read from the middle of a row skips

LogRow = tuple[int, int, int, bytes, bytes | None, bytes | None]
"""First offset, count, timestamp in ms, keys, values, sizes."""


def pack_rows(entries: Sequence[AppendEntry], first: int, now_ms: int, row_bytes: int) -> Iterator[LogRow]:
    """Rows of `entries` in order, from offset `first` on. Records share a row of less than
    `row_bytes`; a tombstone shares with none.
    """
    start = taken = 0
    for index, entry in enumerate(entries):
        size = row_bytes if entry.value is None else len(entry.key) + len(entry.value)
        if index > start and taken + size >= row_bytes:
            yield _row(entries[start:index], first + start, now_ms)
            start, taken = index, 0
        taken += size
    yield _row(entries[start:], first + start, now_ms)


def _row(entries: Sequence[AppendEntry], first: int, now_ms: int) -> LogRow:
    if len(entries) == 1:
        return first, 1, now_ms, entries[0].key, entries[0].value, None
    keys = [entry.key for entry in entries]
    values = [entry.value or b"" for entry in entries]
    sizes = struct.pack(f"<{2 * len(keys)}I", *map(len, keys), *map(len, values))
    return first, len(keys), now_ms, b"".join(keys), b"".join(values), sizes


def unpack_row(topic: str, partition: int, row: LogRow) -> list[Message]:
    """All records of a row."""
    first, count, timestamp_ms, keys, values, sizes = row
    if sizes is None or values is None:
        return [Message(topic, partition, first, timestamp_ms, keys, values)]
    numbers = struct.unpack(f"<{2 * count}I", sizes)
    return list(
        map(
            Message,
            repeat(topic),
            repeat(partition),
            range(first, first + count),
            repeat(timestamp_ms),
            [keys[a:b] for a, b in pairwise(accumulate(numbers[:count], initial=0))],
            [values[a:b] for a, b in pairwise(accumulate(numbers[count:], initial=0))],
        )
    )
