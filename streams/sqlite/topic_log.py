"""One topic in one SQLite file. Truncation, retention and compaction never remove a table's last
row, so the end of a partition never moves back.
"""

import dataclasses
import json
import sqlite3
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from pathlib import Path

from rollstream.deadline import Deadline
from rollstream.errors import BusError, TopicMissing
from rollstream.foreign_json import parse_json
from rollstream.streams.bus import AppendEntry, Message
from rollstream.streams.bus_checks import check_entries, check_position, check_same_settings
from rollstream.streams.sqlite.database import Database, Sync, refuse_sql
from rollstream.streams.topics import TOMBSTONE_S, Topic, partition_of

ROW_BYTES = 64 << 10  # most bytes of several records in a row; a read in its middle loads all

LogRow = tuple[int, int, int, bytes, bytes | None, bytes | None]
"""One row: its first offset, number of records, timestamp in ms, keys, values and sizes.

A row of several records holds their keys joined, their values joined, and as sizes (u32,
little-endian) the lengths of all keys, then of all values: reading 64 records takes half the time.
In a compacted topic each record has a row of its own; in every topic a tombstone does.
"""


def pack_rows(
    entries: Sequence[AppendEntry], first: int, now_ms: int, row_bytes: int
) -> Iterator[LogRow]:
    """Yields the rows. Records of equal timestamp share one while it has less than `row_bytes`; a
    tombstone has a row of its own, with 0 every record. `now_ms` is for entries without a
    timestamp.
    """
    start = taken = 0
    at_ms = entries[0].timestamp_ms if entries else None
    for index, entry in enumerate(entries):
        size = row_bytes if entry.value is None else len(entry.key) + len(entry.value)
        if index > start and (taken + size >= row_bytes or entry.timestamp_ms != at_ms):
            yield _row(entries[start:index], first + start, now_ms)
            start, taken, at_ms = index, 0, entry.timestamp_ms
        taken += size
    yield _row(entries[start:], first + start, now_ms)


def _row(entries: Sequence[AppendEntry], first: int, now_ms: int) -> LogRow:
    at_ms = entries[0].timestamp_ms
    now_ms = now_ms if at_ms is None else at_ms
    if len(entries) == 1:
        return first, 1, now_ms, entries[0].key, entries[0].value, None
    keys = [entry.key for entry in entries]
    values = [entry.value or b"" for entry in entries]
    sizes = struct.pack(f"<{2 * len(keys)}I", *map(len, keys), *map(len, values))
    return first, len(keys), now_ms, b"".join(keys), b"".join(values), sizes


def unpack_row(topic: str, partition: int, row: LogRow) -> list[Message]:
    """Returns a row's records. Raises `BusError` for a row that `pack_rows` does not make."""
    first, count, timestamp_ms, keys, values, sizes = row
    # SQLite keeps values of any type in any column, and another program may have written the file.
    if type(timestamp_ms) is not int or type(keys) is not bytes:
        raise _damaged_row(topic, partition, first)
    if sizes is None:
        if count != 1 or (values is not None and type(values) is not bytes):
            raise _damaged_row(topic, partition, first)
        return [Message(topic, partition, first, timestamp_ms, keys, values)]
    numbers = _sizes_of(count, keys, values, sizes)
    if numbers is None or values is None:
        raise _damaged_row(topic, partition, first)
    # Copies: a record that stays in memory does not keep the whole row.
    return list(
        map(
            Message,
            repeat(topic),
            repeat(partition),
            range(first, first + count),
            repeat(timestamp_ms),
            [keys[a:b] for a, b in pairwise(accumulate(numbers[:count], initial=0))],
            [values[a:b] for a, b in pairwise(accumulate(numbers[count:], initial=0))],
        )
    )


def _sizes_of(count: int, keys: bytes, values: object, sizes: object) -> tuple[int, ...] | None:
    if type(count) is not int or type(values) is not bytes or type(sizes) is not bytes:
        return None
    if not count > 0 or len(sizes) != 8 * count:
        return None
    numbers = struct.unpack(f"<{2 * count}I", sizes)
    fits = sum(numbers[:count]) == len(keys) and sum(numbers[count:]) == len(values)
    return numbers if fits else None


def _damaged_row(topic: str, partition: int, first: int) -> BusError:
    return BusError(
        f"topic {topic!r}, partition {partition}: the row at offset {first} is damaged; keep a "
        "copy of the file, then restore it or start the run in a new folder"
    )


# `begins` has for each partition the offset below which truncation and retention have removed the
# records. This offset may be in the middle of a row; readers never get records below it. Compaction
# does not move it: a reader that misses a removed record will read a newer one of the same key.
_SETTINGS = """
CREATE TABLE settings (topic TEXT NOT NULL);
CREATE TABLE begins (partition INTEGER PRIMARY KEY, begin INTEGER NOT NULL);
"""
_LOG = """
CREATE TABLE log_{p} (
    first INTEGER PRIMARY KEY, count INTEGER NOT NULL, timestamp_ms INTEGER NOT NULL,
    key BLOB NOT NULL, value BLOB, sizes BLOB
);
INSERT INTO begins VALUES ({p}, 0);
"""
_COMPACT = """
CREATE INDEX key_{p} ON log_{p} (key, first);
CREATE INDEX tombstone_{p} ON log_{p} (timestamp_ms) WHERE value IS NULL;
"""

# The rows from the one that contains offset ?1 on. A reader that waits at the end runs this query
# often: it finds that the last row ends before ?1, for which SQLite loads the columns up to `count`
# only. So `count` precedes the long columns.
_ROWS_FROM = """
SELECT first, count, timestamp_ms, key, value, sizes FROM log_{p}
WHERE first >= ifnull((SELECT max(first) FROM log_{p} WHERE first <= ?1), 0) AND first + count > ?1
ORDER BY first LIMIT ?2
"""

OFFSET_END = 1 << 62  # below what readers of log and archive take as "no end"
PARTITIONS_MAX = 4096  # a file states its number, and readers make a query for each partition
CREATED_S = 10.0  # for this long an empty file may be one that another process is creating


class TopicLog:
    """One topic in the existing file of `database`; closing the topic closes it."""

    def __init__(self, database: Database, created_s: float = CREATED_S) -> None:
        self._database = database
        with database.reading("read the settings in") as connection:
            self.settings = _stored_settings(connection, database.path, Deadline(created_s))

    @staticmethod
    def create(path: Path, topic: Topic, sync: Sync) -> "TopicLog":
        """Opens or makes the topic's file. Raises `BusError` if an existing one has other
        settings.
        """
        database = Database(path, sync)
        try:
            with database.writing("create") as connection:
                if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                    _create_tables(connection, topic)
            log = TopicLog(database)
            check_same_settings(log.settings, topic)
        except BaseException:
            database.close()
            raise
        return log

    def append(self, entries: Sequence[AppendEntry], now_ms: int) -> list[int]:
        """Appends in one transaction, which also compacts a compacted topic, and truncates records
        older than the retention.
        """
        topic = self.settings
        check_entries(topic, entries)
        by_partition: dict[int, list[int]] = {}
        for index, entry in enumerate(entries):
            partition = entry.partition
            if partition is None:
                partition = partition_of(entry.key, topic.partitions)
            by_partition.setdefault(partition, []).append(index)
        offsets = [0] * len(entries)
        row_bytes = 0 if topic.cleanup == "compact" else ROW_BYTES
        with self._database.writing("append to") as connection:
            for partition, indices in by_partition.items():
                end = _end(connection, partition)
                for offset, index in enumerate(indices, end):
                    offsets[index] = offset
                rows = list(
                    pack_rows([entries[index] for index in indices], end, now_ms, row_bytes)
                )
                connection.executemany(f"INSERT INTO log_{partition} VALUES (?,?,?,?,?,?)", rows)
                if topic.cleanup == "compact":
                    _compact(connection, partition, rows, now_ms)
                if topic.retention_s is not None:
                    _expire(connection, partition, now_ms - int(topic.retention_s * 1000))
        return offsets

    def read(self, positions: Mapping[int, int], records_max: int, bytes_max: int) -> list[Message]:
        """Returns records within both bounds, but at least one record if there is any. Raises
        `PositionLost` for an offset that was truncated.
        """
        messages: list[Message] = []
        for partition, offset in positions.items():
            if len(messages) >= records_max or bytes_max <= 0:
                break
            with self._database.reading("read") as connection:
                bytes_max -= self._read_partition(
                    connection, partition, offset, records_max, bytes_max, messages
                )
        return messages

    def begin(self) -> dict[int, int]:
        with self._database.reading("read") as connection:
            rows = connection.execute("SELECT partition, begin FROM begins ORDER BY partition")
            begins = dict(rows.fetchall())
            return {p: self._offset(begins.get(p)) for p in range(self.settings.partitions)}

    def end(self) -> dict[int, int]:
        with self._database.reading("read") as connection:
            ends = {p: _end(connection, p) for p in range(self.settings.partitions)}
            return {partition: self._offset(end) for partition, end in ends.items()}

    def changes(self) -> tuple[int, int]:
        """Returns two numbers that show a write without a query (3 µs): the first changes when
        another connection writes, the second when this one does.
        """
        with self._database.reading("read") as connection:
            # Both under the connection's lock: otherwise a thread could get the new `end` of
            # another thread's append with the old numbers, take the topic as unchanged, and read
            # nothing below that end.
            version: int = connection.execute("PRAGMA data_version").fetchone()[0]
            return version, connection.total_changes + self._database.generation

    def truncate(self, before: Mapping[int, int]) -> None:
        with self._database.writing("truncate") as connection:
            for partition, offset in before.items():
                _truncate(connection, partition, offset)

    def close(self) -> None:
        self._database.close()

    def _read_partition(
        self,
        connection: sqlite3.Connection,
        partition: int,
        offset: int,
        records_max: int,
        bytes_max: int,
        messages: list[Message],
    ) -> int:
        if not 0 <= partition < self.settings.partitions:
            raise BusError(f"topic {self.settings.name!r} has no partition {partition}")
        topic, taken, before = self.settings.name, 0, len(messages)
        rows = connection.execute(_ROWS_FROM.format(p=partition), (offset, records_max))
        for row in rows:
            messages_of_row = unpack_row(topic, partition, row)
            if row[0] < offset:
                del messages_of_row[: offset - row[0]]
            del messages_of_row[records_max - len(messages) :]
            size = len(row[3]) + len(row[4] or b"")
            if taken + size > bytes_max:
                messages += _fit_bytes(messages_of_row, bytes_max - taken, 0 if messages else 1)
                taken = bytes_max
                break
            messages += messages_of_row
            taken += size
            if len(messages) >= records_max:
                break
        rows.close()
        first = messages[before].offset if len(messages) > before else None
        self._check_position(connection, partition, offset, first)
        return taken

    def _check_position(
        self, connection: sqlite3.Connection, partition: int, offset: int, first: int | None
    ) -> None:
        """`first` is the first offset that the read returned; None if it returned no record."""
        # After the rows were read, so that a truncation before the read is noticed.
        row = connection.execute("SELECT begin FROM begins WHERE partition = ?", (partition,))
        begin = self._offset((row.fetchone() or (None,))[0])
        end = first + 1 if first is not None and begin <= offset else _end(connection, partition)
        check_position(self.settings.name, partition, offset, begin, self._offset(end))

    def _offset(self, stored: object) -> int:
        if type(stored) is not int or not 0 <= stored < OFFSET_END:
            raise BusError(
                f"{self._database.path}: a partition begins or ends at {str(stored)[:40]!r}, "
                "which is no offset; the file is damaged: restore it from a copy"
            )
        return stored


def _fit_bytes(messages: Sequence[Message], bytes_max: int, at_least: int) -> Sequence[Message]:
    for index, message in enumerate(messages):
        bytes_max -= len(message.key) + len(message.value or b"")
        if bytes_max < 0:
            return messages[: max(index, at_least)]
    return messages


def _stored_settings(connection: sqlite3.Connection, path: Path, created: Deadline) -> Topic:
    while not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'settings'").fetchone():
        # Another process may have just created the file: its first commit writes the settings.
        if created.passed():
            raise _no_settings(path)
        time.sleep(0.005)
    row = connection.execute("SELECT topic FROM settings").fetchone()
    if row is None:
        raise _no_settings(path)
    try:
        settings = parse_json(row[0], Topic)
    except (ValueError, TypeError) as error:  # TypeError: the column holds a number
        raise BusError(f"{path} is not a topic of a bus: its settings: {error}") from None
    if settings.name != path.stem or not 0 < settings.partitions <= PARTITIONS_MAX:
        raise BusError(
            f"{path} is not a topic of a bus: its settings are of topic {settings.name[:80]!r} "
            f"with {settings.partitions} partitions (1 to {PARTITIONS_MAX} are possible)"
        )
    _check_tables(connection, path, settings.partitions)
    return settings


def _check_tables(connection: sqlite3.Connection, path: Path, partitions: int) -> None:
    refuse_sql(connection, path)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    lacking = [p for p in range(partitions) if f"log_{p}" not in tables]
    if lacking or "begins" not in tables:
        raise BusError(f"{path} is not a topic of a bus: it lacks tables of its partitions")


def _no_settings(path: Path) -> TopicMissing:
    return TopicMissing(
        f"{path} is not a topic of a bus: it has no settings; choose another folder"
    )


def _create_tables(connection: sqlite3.Connection, topic: Topic) -> None:
    script = _SETTINGS
    for partition in range(topic.partitions):
        script += _LOG.format(p=partition)
        if topic.cleanup == "compact":
            script += _COMPACT.format(p=partition)
    for statement in filter(str.strip, script.split(";")):
        connection.execute(statement)
    settings = json.dumps(dataclasses.asdict(topic))
    connection.execute("INSERT INTO settings VALUES (?)", (settings,))


def _end(connection: sqlite3.Connection, partition: int) -> int:
    last = connection.execute(
        f"SELECT first + count FROM log_{partition} ORDER BY first DESC LIMIT 1"
    ).fetchone()
    return 0 if last is None else last[0]


def _truncate(connection: sqlite3.Connection, partition: int, before: int) -> None:
    # The last record always stays.
    before = min(before, _end(connection, partition) - 1)
    moved = connection.execute(
        "UPDATE begins SET begin = ? WHERE partition = ? AND begin < ?", (before, partition, before)
    )
    if moved.rowcount:
        connection.execute(
            f"DELETE FROM log_{partition} WHERE first < ?1 AND first + count <= ?1", (before,)
        )


def _expire(connection: sqlite3.Connection, partition: int, before_ms: int) -> None:
    # Usually the first record is young enough, and this costs one query.
    row = connection.execute(
        f"SELECT first FROM log_{partition} WHERE timestamp_ms >= ? ORDER BY first LIMIT 1",
        (before_ms,),
    ).fetchone()
    _truncate(connection, partition, _end(connection, partition) if row is None else row[0])


def _compact(
    connection: sqlite3.Connection, partition: int, rows: Sequence[LogRow], now_ms: int
) -> None:
    # New rows of a compacted topic hold one record each.
    connection.executemany(
        f"DELETE FROM log_{partition} WHERE key = ? AND first < ?",
        [(key, first) for first, _, _, key, _, _ in rows],
    )
    connection.execute(
        f"DELETE FROM log_{partition} WHERE value IS NULL AND timestamp_ms < ? AND first < ?",
        (now_ms - int(TOMBSTONE_S * 1000), rows[-1][0]),
    )
