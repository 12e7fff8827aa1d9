"""Names the archive's files (`archive_key`, `merged_key`) and selects from a listing those that
hold each row once (`current_files`). docs/reference/archive.md has the interleavings.

The name of a file decides which archiver writes it, so each record is archived exactly once.
Importing this module imports neither pyarrow nor NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.streams.bus import Message

ARCHIVE_PREFIX = "archive/"
DAY_MS = 86_400_000
_MS_MAX = 253_402_300_799_999  # the end of year 9999, the last that a date can name
_KEY = re.compile(
    r"archive/topic=([^/]+)/run=([^/]+)/date=(\d{4}-\d\d-\d\d)/"
    r"\1-(\d{5})-(\d{20})(?:-(\d{20}))?\.parquet"
)


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """Describes one file as a listing shows it: `bytes` is its size, `first` its first record's
    offset.

    `last` is the last offset of a merged file, None for a file that the archiver wrote.
    """

    key: str
    bytes: int
    topic: str
    run: str
    date: str
    partition: int
    first: int
    last: int | None = None


def utc_day(timestamp_ms: int) -> int:
    """Returns the number of UTC days since 1970."""
    return min(max(timestamp_ms, 0), _MS_MAX) // DAY_MS


def message_bytes(message: Message) -> int:
    """Returns the size of a message in bytes, by which files and row groups are limited."""
    return len(message.key) + len(message.value or b"")


def archive_key(topic: str, run: str, partition: int, first: int, timestamp_ms: int) -> str:
    """Returns the key of the file whose first record has this offset and timestamp.

    Two archivers that continue from one offset get the same key, however many records each has
    read: the key does not contain the last offset, and its day is the UTC day of the first record's
    own timestamp. The store's `create` lets only one of them write the file, so each record is
    archived exactly once.
    """
    date = datetime.fromtimestamp(utc_day(timestamp_ms) * DAY_MS // 1000, UTC).date().isoformat()
    return f"{archive_prefix(topic, run)}date={date}/{topic}-{partition:05d}-{first:020d}.parquet"


def merged_key(first: ArchiveFile, last: int) -> str:
    """Returns the key of the merged file that holds the rows from `first`'s first offset to offset
    `last`. Unlike the key of an archiver's file, it contains both offsets.
    """
    folder = first.key.rpartition("/")[0]
    return f"{folder}/{first.topic}-{first.partition:05d}-{first.first:020d}-{last:020d}.parquet"


def archive_prefix(topic: str | None = None, run: str | None = None) -> str:
    """Returns the common prefix of all keys of the archive, of a topic, or of a run's topic."""
    topics = ARCHIVE_PREFIX if topic is None else f"{ARCHIVE_PREFIX}topic={topic}/"
    return topics if topic is None or run is None else f"{topics}run={run}/"


def parse_archive_key(key: str, size: int) -> ArchiveFile | None:
    """Returns the file that a key names; None if the key is not the archive's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    topic, run, date, partition, first, last = match.groups()
    return ArchiveFile(
        key, size, topic, run, date, int(partition), int(first), int(last) if last else None
    )


def current_files(listed: Iterable[ArchiveFile | None]) -> list[ArchiveFile]:
    """Returns the files that hold each row of the archive once, ordered by topic, run, partition
    and first offset. None in `listed` (a key that is not the archive's) is skipped; the other files
    of the listing are redundant.

    A merged file and the files that it holds exist side by side for a while. Two merged files are
    disjoint or one contains the other (`merging.py`), so a file whose first offset is in the range
    of a wider one is redundant. An archiver that was suspended meanwhile may write one of the
    smaller files again, even with more rows: that file is redundant too.
    """
    files = [file for file in listed if file is not None]
    files.sort(key=lambda f: (f.topic, f.run, f.partition, f.first, -(f.last or f.first)))
    found: list[ArchiveFile] = []
    merged: dict[tuple[str, str, int], int] = {}
    for file in files:
        partition = file.topic, file.run, file.partition
        if file.first > merged.get(partition, -1):
            found.append(file)
            if file.last is not None:
                merged[partition] = file.last
    return found
