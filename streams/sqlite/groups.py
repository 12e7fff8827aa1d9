"""Consumer groups on SQLite: a member holds partitions by leases, entries with an expiry time (not
the lease of a role), at most one at a time. Delivery is at least once: records that were read and
not committed are read again by the next holder.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollstream.deadline import Deadline
from rollstream.streams.bus import Bus, Message
from rollstream.streams.records import Fence, Position
from rollstream.streams.sqlite.database import Database, Sync, refuse_sql

CLAIM_EVERY_S = 0.2  # a waiting member claims again at least this often: others may leave


class GroupCoordinator(Protocol):
    """Leases are valid until a fixed time after the member's last `claim`."""

    def claim(self, group: str, topic: str, member: str, partitions: int) -> frozenset[int]:
        """Register the member as alive; returns the partitions that it holds now."""
        ...

    def commit_held(
        self, group: str, topic: str, member: str, positions: Mapping[int, Position]
    ) -> None:
        """Stores the positions of partitions whose lease no other member has taken, even if it ran
        out; the others are ignored. Otherwise a member that was suspended for longer than its
        lease, and not replaced, would commit nothing, and believe that it had.
        """
        ...

    def leave(self, group: str, topic: str, member: str) -> None: ...


class LeasedGroupReader:
    """A member that does not poll loses its partitions when its leases expire."""

    def __init__(
        self, bus: Bus, coordinator: GroupCoordinator, group: str, topic: str, member: str
    ) -> None:
        self._bus = bus
        self._coordinator = coordinator
        self._names = (group, topic, member)
        self._positions: dict[int, int] = {}
        self._claim()

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        deadline = Deadline(wait_s)
        while True:
            self._update_claim()
            if not records_max:
                return []
            slice_s = min(deadline.remaining_s(), CLAIM_EVERY_S)
            if self._positions:
                messages = self._bus.read(
                    self._names[1], self._positions, records_max=records_max, wait_s=slice_s
                )
                if messages:
                    for message in messages:
                        self._positions[message.partition] = message.offset + 1
                    return messages
            elif slice_s:
                time.sleep(min(slice_s, 0.01))
            if deadline.passed():
                return []

    def commit(self, before: Mapping[int, int] | None = None) -> None:
        ends = before or {}
        positions = {p: Position(min(at, ends.get(p, at))) for p, at in self._positions.items()}
        self._coordinator.commit_held(*self._names, positions)

    def pass_lost(self) -> dict[int, int]:
        begin = self._bus.begin(self._names[1])
        lost = {p: begin[p] - at for p, at in self._positions.items() if at < begin[p]}
        self._positions |= {p: begin[p] for p in lost}
        return lost

    def close(self) -> None:
        self._coordinator.leave(*self._names)
        self._positions = {}

    def _claim(self) -> frozenset[int]:
        return self._coordinator.claim(*self._names, self._bus.partitions(self._names[1]))

    def _update_claim(self) -> None:
        group, topic, _ = self._names
        claimed = self._claim()
        if claimed != self._positions.keys():
            committed = self._bus.committed(group, topic)
            begin = self._bus.begin(topic)
            for partition in self._positions.keys() - claimed:
                del self._positions[partition]
            for partition in claimed - self._positions.keys():
                at = committed.get(partition)
                self._positions[partition] = begin[partition] if at is None else at.offset


@dataclass(frozen=True, slots=True)
class PartitionLease:
    owner: str
    expires_s: float


def claim_partitions(
    member: str,
    members: Mapping[str, float],
    leases: Mapping[int, PartitionLease],
    partitions: int,
    now_s: float,
) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the partitions that `member` holds and those that it releases; `members` maps all
    members to their expiry times, and `member` itself counts as alive. A new member gets its share
    once the others have released it.
    """
    alive = sorted({name for name, expires_s in members.items() if expires_s > now_s} | {member})
    # Dealt to the live members in turn, in the order of their names.
    share = {p for p in range(partitions) if alive[p % len(alive)] == member}
    mine = {p for p, lease in leases.items() if lease.owner == member and lease.expires_s > now_s}
    taken = {p for p, lease in leases.items() if lease.expires_s > now_s} - mine
    return frozenset(share - taken), frozenset(mine - share)


_TABLES = (
    "CREATE TABLE IF NOT EXISTS commits (group_name TEXT, topic TEXT, partition INTEGER, "
    "offset INTEGER, term INTEGER, sequence INTEGER, presumed INTEGER DEFAULT 0, "
    "PRIMARY KEY (group_name, topic, partition)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS members (group_name TEXT, topic TEXT, member TEXT, "
    "expires_s REAL, PRIMARY KEY (group_name, topic, member)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS leases (group_name TEXT, topic TEXT, partition INTEGER, "
    "owner TEXT, expires_s REAL, PRIMARY KEY (group_name, topic, partition)) WITHOUT ROWID",
)
_OF_GROUP = "WHERE group_name = ? AND topic = ?"


def read_commits(database: Database, group: str, topic: str) -> dict[int, Position]:
    with database.reading("read") as connection:
        columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(commits)")}
        # A file of release 0.1.0 lacks the column.
        presumed = "presumed" if "presumed" in columns else "0"
        rows = connection.execute(
            f"SELECT partition, offset, term, sequence, {presumed} FROM commits {_OF_GROUP}",
            (group, topic),
        )
        return {p: Position(at, Fence(term, seq, bool(pre))) for p, at, term, seq, pre in rows}


class SqliteGroups:
    """Every change is one transaction, so no other member can claim a partition between the check
    of a lease and the commit.
    """

    def __init__(self, path: Path, sync: Sync, lease_s: float, clock: Callable[[], float]) -> None:
        self._database = Database(path, sync)
        self._lease_s, self._clock = lease_s, clock
        with self._database.writing("create") as connection:
            refuse_sql(connection, path)
            for table in _TABLES:
                connection.execute(table)
            columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(commits)")}
            if "presumed" not in columns:  # the file is of release 0.1.0
                connection.execute("ALTER TABLE commits ADD COLUMN presumed INTEGER DEFAULT 0")

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        with self._database.writing("commit to") as connection:
            _store_commits(connection, group, topic, positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        return read_commits(self._database, group, topic)

    def claim(self, group: str, topic: str, member: str, partitions: int) -> frozenset[int]:
        of_group, now_s = (group, topic), self._clock()
        expires_s = now_s + self._lease_s
        with self._database.writing("join a group in") as connection:
            members = dict(
                connection.execute(f"SELECT member, expires_s FROM members {_OF_GROUP}", of_group)
            )
            leases = _leases(connection, group, topic)
            claimed, released = claim_partitions(member, members, leases, partitions, now_s)
            connection.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", (*of_group, member, expires_s)
            )
            connection.executemany(
                f"DELETE FROM leases {_OF_GROUP} AND partition = ?",
                [(*of_group, partition) for partition in released],
            )
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
                [(*of_group, partition, member, expires_s) for partition in claimed],
            )
        return claimed

    def commit_held(
        self, group: str, topic: str, member: str, positions: Mapping[int, Position]
    ) -> None:
        with self._database.writing("commit to") as connection:
            leases = _leases(connection, group, topic)
            owned = {p for p, at in leases.items() if at.owner == member}
            _store_commits(
                connection, group, topic, {p: at for p, at in positions.items() if p in owned}
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
        "INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (group, topic, p, at.offset, at.fence.term, at.fence.sequence, at.fence.presumed)
            for p, at in positions.items()
        ],
    )
