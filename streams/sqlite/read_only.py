"""Reads the log of a run that may come from another user.

A file is opened in one of three ways, none of which makes or changes a file of the run, except
SQLite's index of a log in use (`-shm`), by which readers and writers of one machine agree:

* without a write-ahead log (`-wal`): the run was stopped; SQLite reads the file as unchanging. If a
  run starts meanwhile, the file is opened the second way, and the read is repeated.
* with a `-wal` and its `-shm`: the run lives, or was killed; SQLite's own locks hold.
* with a `-wal` alone, as in a copy: SQLite would have to write a `-shm` beside it, so both are
  copied to a private folder.

SQL that a file defines (views, triggers, virtual tables, generated columns) is refused: SQLite
would run it.
"""

import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import BusError, OutsideRun, ReadOnly
from rollstream.os_failures import explain_os_error
from rollstream.streams.bus import AppendEntry, GroupReader, Message
from rollstream.streams.records import Position
from rollstream.streams.sqlite.bus import SqliteTopics
from rollstream.streams.sqlite.database import BUSY_MS, Database, check_files, refuse_sql
from rollstream.streams.sqlite.groups import read_commits
from rollstream.streams.sqlite.topic_log import TopicLog
from rollstream.streams.topics import Topic
from rollstream.temporary_folder import TemporaryFolder

READS_MAX = 5  # of one read, while a run starts or ends: each of these moments happens once
Result = TypeVar("Result")
_Signature = tuple[tuple[int, int, int] | None, ...]


class _FileChanged(BusError):
    """A file that was read as unchanging was written meanwhile."""


class ReadOnlyDatabase(Database):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._copy: TemporaryFolder | None = None
        with self.translated("open"):
            self._open()

    @contextmanager
    def reading(self, what: str) -> Generator[sqlite3.Connection]:
        self._check_process()
        with self._lock, self.translated(what):
            if self._is_fixed and self._signature != _signature(self.path):
                self._connection.close()
                self._open()
            try:
                yield self._connection
            except sqlite3.DatabaseError:
                self._check_unchanged()  # half of a change looks like damage
                raise
            self._check_unchanged()

    @contextmanager
    def writing(self, what: str) -> Generator[sqlite3.Connection]:
        raise ReadOnly(f"cannot {what} {self.path}: the log was opened for reading")
        yield self._connection  # the type of a context manager

    def close(self) -> None:
        super().close()
        if self._copy is not None:
            self._copy.close()

    def _check_unchanged(self) -> None:
        if self._is_fixed and self._signature != _signature(self.path):
            raise _FileChanged(f"{self.path} was written while it was read; try again")

    def _open(self) -> None:
        check_files(self.path)
        self._signature = _signature(self.path)
        file, wal, shm = self._signature
        if file is None:
            raise BusError(f"{self.path} is missing; it was removed while the log was read")
        path, options = self.path, "mode=ro"
        has_changes = wal is not None and wal[1] > 0
        if not has_changes:
            options += "&immutable=1"
        elif shm is None:
            path = self._copied()
        self._is_fixed = not has_changes or shm is None
        self.generation += 1
        self._connection = sqlite3.connect(
            f"file:{quote(str(path))}?{options}",
            uri=True,
            timeout=BUSY_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
            self._pragma(pragma)
        refuse_sql(self._connection, self.path)

    def _copied(self) -> Path:
        if self._copy is not None:
            self._copy.close()
        self._copy = TemporaryFolder("log")
        target = self._copy.path / self.path.name
        try:
            for suffix in ("", "-wal"):
                shutil.copyfile(f"{self.path}{suffix}", f"{target}{suffix}")
        except OSError as error:
            raise BusError(
                f"cannot copy {self.path} to {target.parent}: {explain_os_error(error)} (its last "
                "records are in a write-ahead log, which is read in a copy: TMPDIR names another "
                "folder for it)"
            ) from error
        return target


def _signature(path: Path) -> _Signature:
    """Raises `OutsideRun` unless the file, its `-wal` and its `-shm` are missing or regular files
    without a second name, which another folder may have.
    """
    states: list[tuple[int, int, int] | None] = []
    for suffix in ("", "-wal", "-shm"):
        try:
            status = os.lstat(f"{path}{suffix}")
        except FileNotFoundError:
            states.append(None)
            continue
        if not stat.S_ISREG(status.st_mode) or (suffix == "-shm" and status.st_nlink > 1):
            raise OutsideRun(
                f"{path}{suffix} is no regular file of its own (a link, pipe or device): not opened"
            )
        states.append(
            # The times of the `-shm` change when it is read, so of it only the presence counts.
            (0, 0, 0) if suffix == "-shm" else (status.st_ino, status.st_size, status.st_mtime_ns)
        )
    return tuple(states)


class SqliteReader(SqliteTopics):
    """The reading part of `Bus`, perhaps on a read-only disk; the others raise `ReadOnly`."""

    def __init__(self, folder: ContainedFolder) -> None:
        super().__init__(folder.root)
        self._contained = folder

    def settings(self, topic: str) -> Topic:
        return _repeated(lambda: super(SqliteReader, self).settings(topic))

    def partitions(self, topic: str) -> int:
        return self.settings(topic).partitions

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        return _repeated(
            lambda: super(SqliteReader, self).read(
                topic, positions, records_max=records_max, bytes_max=bytes_max, wait_s=wait_s,
                exact=exact,
            )
        )  # fmt: skip

    def begin(self, topic: str) -> dict[int, int]:
        return _repeated(lambda: super(SqliteReader, self).begin(topic))

    def end(self, topic: str) -> dict[int, int]:
        return _repeated(lambda: super(SqliteReader, self).end(topic))

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        path = self._contained.path("groups.db")
        if not path.exists():
            return {}
        with closing(ReadOnlyDatabase(path)) as database:
            return _repeated(lambda: read_commits(database, group, topic))

    def create(self, topics: Sequence[Topic]) -> None:
        self._refuse("create topics in")

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        self._refuse("append to")

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self._refuse("truncate")

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        self._refuse("commit positions in")

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        self._refuse("join a group of")

    def _path(self, topic: str) -> Path:
        return self._contained.path(f"{topic}.db")

    def _opened(self, path: Path) -> TopicLog:
        return TopicLog(ReadOnlyDatabase(path), created_s=0.0)

    def _refuse(self, what: str) -> NoReturn:
        raise ReadOnly(f"cannot {what} {self._contained.root}: the log was opened for reading")


def _repeated(read: Callable[[], Result]) -> Result:
    for _ in range(READS_MAX - 1):
        try:
            return read()
        except _FileChanged:
            continue
    return read()
