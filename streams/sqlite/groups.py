"""Positions and leases of consumer groups, in one file for all topics."""

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

from rollstream.streams.consumer_groups import PartitionLease, claim_partitions
from rollstream.streams.records import Fence, Position
from rollstream.streams.sqlite.database import Database, Sync

_TABLES = (
    "CREATE TABLE IF NOT EXISTS commits (group_name TEXT, topic TEXT, partition INTEGER, "
    "offset INTEGER, term INTEGER, sequence INTEGER, "
    "PRIMARY KEY (group_name, topic, partition)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS members (group_name TEXT, topic TEXT, member TEXT, "
    "expires_s REAL, PRIMARY KEY (group_name, topic, member)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS leases (group_name TEXT, topic TEXT, partition INTEGER, "
    "owner TEXT, expires_s REAL, PRIMARY KEY (group_name, topic, partition)) WITHOUT ROWID",
)
_OF_GROUP = "WHERE group_name = ? AND topic = ?"


class SqliteGroups:
    """A `GroupCoordinator` that also keeps commits. Every change is one transaction; within it a
    member's commit is checked against its lease.
    """

    def __init__(self, path: Path, sync: Sync, lease_s: float, clock: Callable[[], float]) -> None:
        self._database = Database(path, sync)
        self._lease_s, self._clock = lease_s, clock
        with self._database.writing("create") as connection:
            for table in _TABLES:
                connection.execute(table)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        with self._database.writing("commit to") as connection:
            _store_commits(connection, group, topic, positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        with self._database.reading("read") as connection:
            rows = connection.execute(
                f"SELECT partition, offset, term, sequence FROM commits {_OF_GROUP}", (group, topic)
            )
            return {p: Position(offset, Fence(term, seq)) for p, offset, term, seq in rows}

    def claim(self, group: str, topic: str, member: str, partitions: int) -> frozenset[int]:
        of_group, now_s = (group, topic), self._clock()
        expires_s = now_s + self._lease_s
        with self._database.writing("join a group in") as connection:
            members = dict(
                connection.execute(f"SELECT member, expires_s FROM members {_OF_GROUP}", of_group)
            )
            leases = _leases(connection, group, topic)
            claimed = claim_partitions(member, members, leases, partitions, now_s)
            connection.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", (*of_group, member, expires_s)
            )
            connection.executemany(
                f"DELETE FROM leases {_OF_GROUP} AND partition = ?",
                [(*of_group, partition) for partition in claimed.released],
            )
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
                [(*of_group, partition, member, expires_s) for partition in claimed.held],
            )
        return claimed.held

    def commit_held(
        self, group: str, topic: str, member: str, positions: Mapping[int, Position]
    ) -> None:
        now_s = self._clock()
        with self._database.writing("commit to") as connection:
            leases = _leases(connection, group, topic)
            held = {p for p, at in leases.items() if at.owner == member and at.expires_s > now_s}
            _store_commits(
                connection, group, topic, {p: at for p, at in positions.items() if p in held}
            )

    def leave(self, group: str, topic: str, member: str) -> None:
        with self._database.writing("leave a group in") as connection:
            for table, column in (("members", "member"), ("leases", "owner")):
                connection.execute(
                    f"DELETE FROM {table} {_OF_GROUP} AND {column} = ?", (group, topic, member)
                )

    def close(self) -> None:
        self._database.close()


def _leases(connection: sqlite3.Connection, group: str, topic: str) -> dict[int, PartitionLease]:
    rows = connection.execute(
        f"SELECT partition, owner, expires_s FROM leases {_OF_GROUP}", (group, topic)
    )
    return {partition: PartitionLease(owner, expires_s) for partition, owner, expires_s in rows}


def _store_commits(
    connection: sqlite3.Connection, group: str, topic: str, positions: Mapping[int, Position]
) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?, ?)",
        [
            (group, topic, partition, at.offset, at.fence.term, at.fence.sequence)
            for partition, at in positions.items()
        ],
    )
