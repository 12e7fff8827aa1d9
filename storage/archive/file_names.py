"""Names of the archive's files: topic, run, day, partition and first offset, never the last offset.

Two writers that continue from one offset choose the same name, whatever records each has read.
That, and `create` having one winner, makes the archive exactly-once. The day is the UTC day of the
first record's own timestamp, so every writer chooses the same one. Importing this module imports
neither pyarrow nor NumPy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.streams.bus import Message

ARCHIVE_PREFIX = "archive/"
DAY_MS = 86_400_000
_MS_MAX = 253_402_300_799_999  # the end of year 9999, the last that a date can name
_KEY = re.compile(
    r"archive/topic=([^/]+)/run=([^/]+)/date=(\d{4}-\d\d-\d\d)/\1-(\d{5})-(\d{20})\.parquet"
)


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One file as a listing shows it: `bytes` is its size, `first` its first record's offset."""

    key: str
    bytes: int
    topic: str
    run: str
    date: str
    partition: int
    first: int


def utc_day(timestamp_ms: int) -> int:
    """Days since 1970 in UTC."""
    return min(max(timestamp_ms, 0), _MS_MAX) // DAY_MS


def message_bytes(message: Message) -> int:
    """The size of a message, as used to limit files and row groups."""
    return len(message.key) + len(message.value or b"")


def archive_key(topic: str, run: str, partition: int, first: int, timestamp_ms: int) -> str:
    """The key of the file that starts with this record."""
    date = datetime.fromtimestamp(utc_day(timestamp_ms) * DAY_MS // 1000, UTC).date().isoformat()
    return f"{archive_prefix(topic, run)}date={date}/{topic}-{partition:05d}-{first:020d}.parquet"


def archive_prefix(topic: str | None = None, run: str | None = None) -> str:
    """The common prefix of all keys of a topic, or of a run's topic."""
    topics = ARCHIVE_PREFIX if topic is None else f"{ARCHIVE_PREFIX}topic={topic}/"
    return topics if topic is None or run is None else f"{topics}run={run}/"


def parse_archive_key(key: str, size: int) -> ArchiveFile | None:
    """The file that a key names; None if the key is not the archive's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    topic, run, date, partition, first = match.groups()
    return ArchiveFile(key, size, topic, run, date, int(partition), int(first))
