"""The keys of a backup's objects."""

import re
from dataclasses import dataclass

from rollstream.keep.own import declarations
from rollstream.run.config.run_files import RUN_FILES
from rollstream.storage.stores.base import is_key

BACKUP_KEY, BEGUN_KEY = "backup.json", "begun.json"
LOG, STORE, FOLDER = "log/", "store/", "folder/"
"""Prefixes: segments of the log, objects of the store, files of the folder."""
_SEGMENT = re.compile(r"log/([A-Za-z0-9._-]+)/(\d{5})-(\d{20})-(\d{20})\.msgpack")


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Records of one partition at offsets `[first, end)`."""

    topic: str
    partition: int
    first: int
    end: int

    @property
    def key(self) -> str:
        return f"{LOG}{self.topic}/{self.partition:05d}-{self.first:020d}-{self.end:020d}.msgpack"


def parse_segment(key: str) -> LogSegment | None:
    """Returns None for other keys."""
    match = _SEGMENT.fullmatch(key)
    if match is None:
        return None
    topic, *numbers = match.groups()
    return LogSegment(topic, *map(int, numbers))


def is_backup_key(key: str) -> bool:
    """A segment, or an object or file of a form that a run writes."""
    # A backup may come from another user, and its destination may hold other files.
    if key.startswith(STORE):
        name = key.removeprefix(STORE)
        return is_key(key) and any(
            keys.copied != "never" and keys.file(name) is not None for keys in declarations()
        )
    if key.startswith(FOLDER):
        name = key.removeprefix(FOLDER)
        return is_key(key) and any(
            files.copied and files.pattern.fullmatch(name) for files in RUN_FILES
        )
    return parse_segment(key) is not None
