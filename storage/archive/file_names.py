"""Names the archive's Parquet files (`archive_key`, `merged_key`), and selects from a listing those
that together hold each row once (`current_files`).

Names alone prevent double rows: archivers that continue at one offset try to create the same name,
and the store lets one of them succeed; a merged file, which replaces several files, is named by its
first and last offset, so readers know which files to leave out. docs/reference/archive.md has the
interleavings. Importing this module imports neither pyarrow nor NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rollstream.storage.stores.run_keys import RunKeys

if TYPE_CHECKING:
    from rollstream.streams.bus import Message

ARCHIVE_PREFIX = "archive/"
DAY_MS = 86_400_000
_MS_MAX = 253_402_300_799_999  # the end of year 9999, the last that a date can name
_KEY = re.compile(
    r"archive/topic=([^/]+)/run=([^/]+)/date=(\d{4}-\d\d-\d\d)/"
    r"\1-(\d{5})-(\d{20})(?:-(\d{20}))?\.parquet",
    re.ASCII,
)
RUN_KEYS = (RunKeys(_KEY, "later", "archive", linked=True),)


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """Describes one file as a listing shows it: it holds the rows of one partition of the topic
    from offset `first` on; `date` is the UTC day of its first row, `bytes` its size. `last` is the
    last offset of a merged file, None for a file that an archiver wrote, whose name lacks it.
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
    """Returns the UTC day of a time as the number of days since 1970."""
    return min(max(timestamp_ms, 0), _MS_MAX) // DAY_MS


def message_bytes(message: Message) -> int:
    """Returns the size of a message in bytes; files and their row groups are limited by the sum."""
    return len(message.key) + len(message.value or b"")


def archive_key(topic: str, run: str, partition: int, first: int, timestamp_ms: int) -> str:
    """Returns the key of the file whose first record has the offset `first` and this timestamp.

    Two archivers that continue from one offset get the same key, however many records each has
    read: the key does not contain the last offset, and its day is the UTC day of the first record's
    own timestamp. The store's `create` lets only one of them write the file, and the other
    continues behind that file, so each record is archived exactly once.
    """
    date = datetime.fromtimestamp(utc_day(timestamp_ms) * DAY_MS // 1000, UTC).date().isoformat()
    return f"{archive_prefix(topic, run)}date={date}/{topic}-{partition:05d}-{first:020d}.parquet"


def merged_key(first: ArchiveFile, last: int) -> str:
    """Returns the key of the merged file that holds all rows from the file `first` up to offset
    `last`, inclusive. Unlike the key of an archiver's file, it contains both offsets.
    """
    folder = first.key.rpartition("/")[0]
    return f"{folder}/{first.topic}-{first.partition:05d}-{first.first:020d}-{last:020d}.parquet"


def archive_prefix(topic: str | None = None, run: str | None = None) -> str:
    """Returns the common prefix of all keys of the archive, of a topic in it, or of a run's part of
    a topic.
    """
    topics = ARCHIVE_PREFIX if topic is None else f"{ARCHIVE_PREFIX}topic={topic}/"
    return topics if topic is None or run is None else f"{topics}run={run}/"


def parse_archive_key(key: str, size: int) -> ArchiveFile | None:
    """Returns the file that a key names, of `size` bytes; None if the key is not the archive's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    topic, run, date, partition, first, last = match.groups()
    return ArchiveFile(
        key, size, topic, run, date, int(partition), int(first), int(last) if last else None
    )


def current_files(listed: Iterable[ArchiveFile | None]) -> list[ArchiveFile]:
    """Returns the files of a listing that together hold each row once, ordered by topic, run,
    partition and first offset. All other files are redundant; None (for a key that is not the
    archive's) is skipped.

    A merged file and the files that it replaces exist side by side for a while. Two merged files
    are disjoint or one contains the other (`merging.py`), so a file is redundant if its first
    offset is in the range of a merged file before it. That is also true of a small file that an
    archiver, suspended meanwhile, creates after its name was deleted, even with more rows than
    before: this archiver then finds the merged file and continues behind it.
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
