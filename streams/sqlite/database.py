"""One SQLite file, which must be on a local disk: the write-ahead log (WAL) needs memory that its
users share.
"""

import os
import re
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from rollstream.contained_folder import check_regular
from rollstream.deadline import Deadline
from rollstream.errors import BusError, BusTimeout, RollstreamError
from rollstream.os_failures import explain_os_error, failure_to_open, failure_to_write

Sync = Literal["normal", "full"]

BUSY_MS = 10_000  # how long one writer waits for another before it gives up
PAGE_BYTES = 16384  # measured: 50 KB values are written at twice the rate of pages of 4096
WAL_PAGES = 4000  # 64 MB of WAL, after which SQLite copies it into the file (its "checkpoint")
WAL_BYTES = 64 << 20  # size to which the WAL file shrinks after such a copy

_DAMAGED = "the file is damaged: keep a copy, then restore it or start the run in a new folder"
_ADVICE = {
    "SQLITE_FULL": "the disk is full: free space and start again",
    "SQLITE_IOERR": "the disk failed (full, over quota or faulty): free space or check it",
    "SQLITE_READONLY": "the folder or file is read-only: make it writable",
    "SQLITE_CANTOPEN": "check that the folder exists and that it and the file may be written",
    "SQLITE_CORRUPT": _DAMAGED,
    "SQLITE_NOTADB": _DAMAGED,
    "SQLITE_BUSY": f"another process held it for more than {BUSY_MS // 1000} s: try again",
}
_UNEXPLAINED = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_AUTH", "SQLITE_PERM")
"""SQLite hides the system's reason for these; the same is tried once more for it."""


class Database:
    """The process's connection, lent to one thread at a time. `sync="full"` flushes every
    transaction to disk. SQLite's errors are raised as `BusError` (or `BusTimeout`), with `what` in
    the text: "cannot append to FILE: …".
    """

    generation = 0
    """Grows when the connection is replaced: SQLite then counts changes from zero."""

    def __init__(self, path: Path, sync: Sync) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._process = os.getpid()
        with self.translated("open"):
            check_files(path)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
            self._configure(sync)

    def _configure(self, sync: Sync) -> None:
        self._pragma(f"page_size = {PAGE_BYTES}")
        self._enter_wal()
        self._pragma(f"synchronous = {sync.upper()}")
        self._pragma(f"wal_autocheckpoint = {WAL_PAGES}")
        self._pragma(f"journal_size_limit = {WAL_BYTES}")

    def _enter_wal(self) -> None:
        deadline = Deadline(BUSY_MS / 1000)
        while True:
            try:
                mode = self._pragma("journal_mode = WAL")
            except sqlite3.OperationalError as error:
                # While another process switches a new file, SQLite reports it as busy without
                # waiting.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or deadline.passed():
                    raise
                time.sleep(0.005)
                continue
            if mode != "wal":
                raise BusError(
                    f"{self.path}: this file system does not support WAL ({mode}); use a local disk"
                )
            return

    def _pragma(self, text: str) -> object:
        row = self._connection.execute(f"PRAGMA {text}").fetchone()
        return row[0] if row else None

    @contextmanager
    def reading(self, what: str) -> Generator[sqlite3.Connection]:
        """Yields the connection, locked against other threads. Two statements may see different
        states of the file.
        """
        self._check_process()
        with self._lock, self.translated(what):
            yield self._connection

    @contextmanager
    def writing(self, what: str) -> Generator[sqlite3.Connection]:
        """Yields the connection in a write transaction, committed at the end of the block and
        rolled back by any exception.
        """
        self._check_process()
        with self._lock, self.translated(what):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock, self.translated("close"):
            self._connection.close()

    @contextmanager
    def translated(self, what: str) -> Generator[None]:
        """Raises errors of the block as a `BusError` with advice (`BusTimeout` if another process
        held the file for too long).
        """
        try:
            yield
        except OSError as error:
            if isinstance(error, RollstreamError):
                raise
            raise BusError(f"cannot {what} {self.path}: {explain_os_error(error)}") from error
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or type(error).__name__
            family = "_".join(name.split("_")[:2])
            kind = BusTimeout if family == "SQLITE_BUSY" else BusError
            advice = _ADVICE.get(family, "see the message")
            refusal = failure_to_open(self.path) if family in _UNEXPLAINED else None
            if refusal is None and family == "SQLITE_IOERR":
                refusal = failure_to_write(self.path.parent)
            if refusal is not None:
                advice = explain_os_error(refusal)
            raise kind(f"cannot {what} {self.path}: {error} ({name}); {advice}") from error

    def _check_process(self) -> None:
        # SQLite's rule: a child opens a connection of its own.
        if os.getpid() != self._process:
            raise BusError(
                f"{self.path} was opened by process {self._process} before a fork; "
                f"open the bus again in process {os.getpid()}"
            )


_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")


def check_files(path: Path) -> None:
    """Raise `OutsideRun` for a pipe or device, also beside the file, on which SQLite would wait;
    `BusError` if a journal names another file, which SQLite would delete.
    """
    journal = f"{path}-journal"
    check_regular(path, f"{path}-wal", f"{path}-shm", journal)
    with suppress(FileNotFoundError), open(journal, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_SUPER_JOURNAL)))
        if file.read() == _SUPER_JOURNAL:
            raise BusError(
                f"{journal} names another file, which SQLite would delete; this program does not "
                "write such a journal: restore the log from a copy"
            )


_PLAIN = {
    "table": re.compile(r"CREATE TABLE\b", re.IGNORECASE),
    "index": re.compile(r"$|CREATE INDEX\b", re.IGNORECASE),  # those of primary keys have no text
}
_COMPUTED = re.compile(r"\b(AS|GENERATED|SELECT)\b", re.IGNORECASE)


def refuse_sql(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `BusError` for anything but plain tables and indices: a view can be a query that never
    ends, a computed column can hold gigabytes.
    """
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        text = str(sql or "")
        is_plain = _PLAIN[kind].match(text) if kind in _PLAIN else False
        if not is_plain or _COMPUTED.search(text):
            raise BusError(
                f"{path} is no file of a bus: it defines the {kind} {str(name)[:40]!r}, which "
                "runs SQL of its own; it was not written by this program"
            )


MOUNTS = Path("/proc/self/mounts")
# Types of network file systems as /proc/self/mounts names them; those of FUSE are separate, because
# most FUSE file systems are local.
NETWORK_TYPES = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "lustre",
        "glusterfs",
        "beegfs",
        "gpfs",
        "ncpfs",
        "davfs",
    }
)
NETWORK_FUSE = frozenset(
    {
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.rclone",
        "fuse.davfs2",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.goofys",
        "fuse.mount-s3",
        "fuse.juicefs",
    }
)


def network_file_system(folder: str, mounts: str) -> str | None:
    """Returns None for a local one. `folder` is absolute, `mounts` the text of Linux's
    /proc/self/mounts.
    """
    best, file_system = -1, None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = _unescaped(words[1])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        # Of the mount points that contain `folder` the longest counts, and of equal ones the last,
        # because it hides the earlier ones.
        if inside and len(point) >= best:
            best, file_system = len(point), words[2]
    return file_system if file_system in NETWORK_TYPES | NETWORK_FUSE else None


def _unescaped(point: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(escape, character)
    return point


def read_mounts() -> str:
    """Returns "" on a system without it, where every folder counts as local."""
    return MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
