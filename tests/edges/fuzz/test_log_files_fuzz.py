"""Files of a SQLite log that somebody else wrote: records, or `BusError`."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollstream.errors import BusError
from rollstream.streams.bus import AppendEntry
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.database import PAGE_BYTES
from rollstream.streams.sqlite.topic_log import pack_rows, unpack_row
from rollstream.streams.topics import Topic
from tests.edges.fuzz.damage import ODD, changed_bytes, checked, examples

VALUES = st.sampled_from(
    [None, 0, 1, -1, 3, 1 << 40, (1 << 63) - 1, 1.5, "", "1", b"", b"\x00" * 8]
) | st.binary(max_size=40)
ENTRIES = [AppendEntry(b"k%d" % n, b"v" * n) for n in range(4)]


@given(st.data())
@examples(300)
def test_any_row_is_unpacked_or_refused(data: st.DataObject) -> None:
    row: list[Any] = list(data.draw(st.sampled_from(list(pack_rows(ENTRIES, 5, 17, 1000)))))
    for index in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
        row[index] = data.draw(VALUES)
    messages = checked(lambda: unpack_row("t", 0, tuple(row)))  # pyright: ignore[reportArgumentType]
    for message in messages or ():
        assert isinstance(message.key, bytes)
        assert message.value is None or isinstance(message.value, bytes)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    bus = SqliteBus(tmp_path)
    bus.create([Topic("t", 2)])
    bus.append("t", [AppendEntry(e.key, e.value, partition=0) for e in ENTRIES])
    bus.close()
    (path,) = (path for path in tmp_path.iterdir() if path.name.startswith("t."))
    return path


def _edit(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def _read(folder: Path) -> None:
    bus = SqliteBus(folder)
    try:
        at, end = bus.begin("t")[0], bus.end("t")[0]
        for _ in range(10):
            messages = bus.read("t", {0: at})
            if at >= end or not messages:
                break
            at = messages[-1].offset + 1
    finally:
        bus.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)"


@pytest.mark.parametrize(
    "statements",
    [
        ("UPDATE log_0 SET key = 'text'",),
        ("UPDATE log_0 SET timestamp_ms = 'soon'",),
        ("UPDATE log_0 SET value = 7",),
        ("UPDATE log_0 SET sizes = x'00'",),
        ("UPDATE log_0 SET count = 1 << 40",),
        ("UPDATE log_0 SET count = 1.5",),
        ("UPDATE log_0 SET sizes = NULL",),
        ("UPDATE begins SET begin = 'x'",),
        ("UPDATE begins SET begin = -4",),
        ("DELETE FROM begins",),
        ("DROP TABLE log_1",),
        ("DROP TABLE begins",),
        ("UPDATE settings SET topic = 7",),
        ("UPDATE settings SET topic = x'ff'",),
        ("DELETE FROM settings",),
        (
            "DROP TABLE log_0",
            f"CREATE VIEW log_0 AS {ENDLESS} SELECT i AS first, 1 AS count, 0 AS timestamp_ms, "
            "x'00' AS key, x'00' AS value, NULL AS sizes FROM n",
        ),
        (
            "DROP TABLE log_0",
            "CREATE TABLE log_0 (first INTEGER PRIMARY KEY, count INTEGER, timestamp_ms INTEGER, "
            "key BLOB, value BLOB AS (zeroblob(900000000)), sizes BLOB)",
            "INSERT INTO log_0 (first, count, timestamp_ms, key) VALUES (0, 1, 0, x'00')",
        ),
    ],
    ids=lambda statements: statements[-1][:30],
)
def test_a_file_with_other_tables_or_values_is_refused(log: Path, statements: tuple[str]) -> None:
    _edit(log, *statements)
    with pytest.raises(BusError):
        _read(log.parent)


SETTINGS = {"name": "t", "partitions": 2, "cleanup": "safe", "retention_s": None,
            "record_bytes_max": 1000, "writer": ""}  # fmt: skip


@given(st.data())
@examples(30)
def test_any_settings_of_a_topic_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    bus = SqliteBus(folder)
    bus.create([Topic("t", 2)])
    bus.close()
    (path,) = (path for path in folder.iterdir() if path.name.startswith("t."))
    name = data.draw(st.sampled_from(list(SETTINGS)))
    text = json.dumps(SETTINGS | {name: data.draw(ODD)})
    if data.draw(st.booleans()):
        text = changed_bytes(data.draw, text.encode()).decode(errors="replace")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE settings SET topic = ?", (text,))
    connection.close()
    checked(lambda: _read(folder))


@given(st.data())
@examples(25)
def test_a_file_with_damaged_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    bus = SqliteBus(folder)
    bus.create([Topic("t", 2)])
    bus.append("t", ENTRIES)
    bus.close()
    (path,) = (path for path in folder.iterdir() if path.name.startswith("t."))
    whole = path.read_bytes()  # a damaged first page is an unfinished file, for which readers wait
    path.write_bytes(whole[:PAGE_BYTES] + changed_bytes(data.draw, whole[PAGE_BYTES:]))
    checked(lambda: _read(folder))
