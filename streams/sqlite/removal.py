"""What a run has in a folder: each topic is a file, removed after its side files."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from rollstream.contained_folder import check_regular
from rollstream.errors import OutsideRun
from rollstream.streams.kind import LogContents
from rollstream.streams.removal import names_of_topics, remove_empty_folder, topic_names

SQLITE_SUFFIXES = (".db-wal", ".db-shm", ".db")  # the topic's file last
SCHEMA_BYTES = 64 << 10
LOG_TABLES = (b"CREATE TABLE settings (topic", b"CREATE TABLE members")
"""In the files of a topic and of the groups, at the begin unless a topic has many partitions."""


def folder_contents(folder: Path) -> LogContents:
    """Returns the topics and groups; all groups are one file, listed as the group `groups`."""
    files = list(_files(folder))
    topics = tuple(f.stem for f in files if f.suffix == ".db" and f.stem != "groups")
    groups = ("groups",) if any(f.stem == "groups" for f in files) else ()
    return LogContents(str(folder), topics, groups, sum(f.stat().st_size for f in files))


def remove_files(folder: Path) -> None:
    """Removes the files, and the folder if nothing is left in it."""
    for path in _files(folder):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        remove_empty_folder(folder)


def _files(folder: Path) -> list[Path]:
    present = (path.name.partition(".db")[0] for path in folder.glob("*.db*"))
    known = names_of_topics((*topic_names(), *present))
    names = [name for name in (*known, "groups") if name != "ledger"]
    return [
        path
        # The ledger's last: it proves that the others are a run's.
        for name in (*names, "ledger")
        if _is_log_file(folder / name)
        for suffix in SQLITE_SUFFIXES
        if (path := folder / f"{name}{suffix}").is_symlink() or path.exists()
    ]


def _is_log_file(path: Path) -> bool:
    starts: list[bytes] = []
    try:
        check_regular(*(f"{path}{suffix}" for suffix in SQLITE_SUFFIXES))
    except OutsideRun:
        return False
    # Before the first checkpoint SQLite states the tables in the side file.
    for suffix in (".db", ".db-wal"):
        with suppress(OSError), open(f"{path}{suffix}", "rb") as file:
            starts.append(file.read(SCHEMA_BYTES))
    # An empty file is an interrupted creation, a side file alone an interrupted removal.
    if not any(starts) or any(table in start for start in starts for table in LOG_TABLES):
        return True
    with suppress(sqlite3.Error), closing(sqlite3.connect(_immutable(path), uri=True)) as there:
        names = {str(name) for (name,) in there.execute("SELECT name FROM sqlite_master")}
        return {"settings", "begins"} <= names or {"commits", "members"} <= names
    return False


def _immutable(path: Path) -> str:
    return f"file:{quote(f'{path.absolute()}.db')}?mode=ro&immutable=1"
