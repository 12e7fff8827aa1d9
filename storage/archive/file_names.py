"""Names of the archive's Parquet files: they alone prevent double rows (docs/reference/archive.md,
Exactly once).
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
    """Rows from offset `first` on; `last` is the last offset of a merged file, None for an
    archiver's, whose name lacks it.
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
    return len(message.key) + len(message.value or b"")


def archive_key(topic: str, run: str, partition: int, first: int, timestamp_ms: int) -> str:
    """Returns the key: two archivers that continue from one offset get the same, so the store's
    `create` lets only one write the file, and each record is archived exactly once.
    """
    # Neither the last offset nor a clock: the day is that of the first record's own timestamp.
    date = datetime.fromtimestamp(utc_day(timestamp_ms) * DAY_MS // 1000, UTC).date().isoformat()
    return f"{archive_prefix(topic, run)}date={date}/{topic}-{partition:05d}-{first:020d}.parquet"


def merged_key(first: ArchiveFile, last: int) -> str:
    """Returns the key of the file with all rows from the file `first` up to offset `last`,
    inclusive.
    """
    folder = first.key.rpartition("/")[0]
    return f"{folder}/{first.topic}-{first.partition:05d}-{first.first:020d}-{last:020d}.parquet"


def archive_prefix(topic: str | None = None, run: str | None = None) -> str:
    """Returns the prefix of the archive, of a topic in it, or of a run's part of a topic."""
    topics = ARCHIVE_PREFIX if topic is None else f"{ARCHIVE_PREFIX}topic={topic}/"
    return topics if topic is None or run is None else f"{topics}run={run}/"


def parse_archive_key(key: str, size: int) -> ArchiveFile | None:
    """Returns None if the key is not the archive's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    topic, run, date, partition, first, last = match.groups()
    return ArchiveFile(
        key, size, topic, run, date, int(partition), int(first), int(last) if last else None
    )


def current_files(listed: Iterable[ArchiveFile | None]) -> list[ArchiveFile]:
    """Returns files that together hold each row once, ordered by topic, run, partition and first
    offset; None is skipped.
    """
    files = [file for file in listed if file is not None]
    files.sort(key=lambda f: (f.topic, f.run, f.partition, f.first, -(f.last or f.first)))
    current: list[ArchiveFile] = []
    # Two merged files are disjoint or one contains the other (`merging.py`), and files that one
    # replaces stay for a while: a file is redundant if it begins in the range of a merged file
    # before it.
    merged: dict[tuple[str, str, int], int] = {}
    for file in files:
        partition = file.topic, file.run, file.partition
        # Also false for a small file that a suspended archiver creates after its name was deleted,
        # even with more rows: this archiver then finds the merged file and continues behind it.
        if file.first > merged.get(partition, -1):
            current.append(file)
            if file.last is not None:
                merged[partition] = file.last
    return current
