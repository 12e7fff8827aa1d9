"""Opens one SQLite file (`Database`), runs transactions on it, and raises SQLite's errors as the
project's error classes. Several processes and threads may use a file at once.

A process has one connection per file behind a lock, which a transaction holds. After a fork the
child must open a connection of its own (SQLite's rule): an inherited one is refused. The file must
be on a local disk, because SQLite's write-ahead log (WAL) needs memory that its users share: the
bus refuses folders on a network file system, which `network_file_system` detects.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rollstream.deadline import Deadline
from rollstream.errors import BusError, BusTimeout

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


class Database:
    """Holds the process's connection to the file at `path`. `reading` and `writing` lend it to one
    thread at a time. `sync="full"` flushes every transaction to disk. SQLite's errors are raised as
    `BusError` (or its subclass `BusTimeout`), with `what` in the text: "cannot append to FILE: …".
    """

    def __init__(self, path: Path, sync: Sync) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._process = os.getpid()
        with self.translated("open"):
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
        """Switch the file to WAL. While another process does the same in a new file, SQLite reports
        it as busy without waiting, so this retries for `BUSY_MS`.
        """
        deadline = Deadline(BUSY_MS / 1000)
        while True:
            try:
                mode = self._pragma("journal_mode = WAL")
            except sqlite3.OperationalError as error:
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
        """Yield the connection for reading, locked against other threads. Each statement sees one
        state of the file; two statements may see different ones.
        """
        self._check_process()
        with self._lock, self.translated(what):
            yield self._connection

    @contextmanager
    def writing(self, what: str) -> Generator[sqlite3.Connection]:
        """Yield the connection inside a write transaction. It is committed at the end of the block,
        and rolled back by any exception.
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
        """Raise a `sqlite3.Error` of the block as a `BusError` with advice (as `BusTimeout` if
        another process held the file for too long).
        """
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or type(error).__name__
            family = "_".join(name.split("_")[:2])
            kind = BusTimeout if family == "SQLITE_BUSY" else BusError
            advice = _ADVICE.get(family, "see the message")
            raise kind(f"cannot {what} {self.path}: {error} ({name}); {advice}") from error

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise BusError(
                f"{self.path} was opened by process {self._process} before a fork; "
                f"open the bus again in process {os.getpid()}"
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
    """Return the type of the file system that holds the absolute path `folder` if it is a network
    file system, else None.

    `mounts` is the text of Linux's /proc/self/mounts. Of the mount points that contain `folder` the
    longest counts, and of equal ones the last, because it hides the earlier ones.
    """
    best, found = -1, None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = _unescaped(words[1])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), words[2]
    return found if found in NETWORK_TYPES | NETWORK_FUSE else None


def _unescaped(point: str) -> str:
    """Return a mount point without the octal escapes that /proc/self/mounts uses for blanks, tabs,
    newlines and backslashes.
    """
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(escape, character)
    return point


def read_mounts() -> str:
    """Return the text of /proc/self/mounts. It is empty on a system without that file, where every
    folder then counts as local.
    """
    return MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
