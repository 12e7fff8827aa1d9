"""Making the views that hold rows: topics from archive and log, evaluations, settings."""
# duckdb and pyarrow ship few types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import duckdb

from rollstream.analysis.archived import quoted
from rollstream.analysis.coverage import Held, Hole, holes, words
from rollstream.analysis.place import Place

if TYPE_CHECKING:
    from rollstream.analysis.session import Session

HIVE = "hive_partitioning = true, hive_types = {topic: VARCHAR, run: VARCHAR, date: DATE}"
LOOKS_MORE = 2  # at the archive, when rows left the log meanwhile
EVALUATION = {
    "step": "BIGINT",
    "seconds": "DOUBLE",
    "accuracy_sampled": "DOUBLE",
    "accuracy_greedy": "DOUBLE",
    "length_median": "DOUBLE",
    "length_p99": "DOUBLE",
    "shares": "MAP(VARCHAR, DOUBLE)",
}
"""Columns of `evaluations`; a line as a whole is in its column `line`."""


def define_topic(session: "Session", topic: str) -> None:
    """A view of the topic's archived rows and of those that only the log has, each once.

    Rows that were archived and truncated away between a look at the archive and one at the log are
    found by looking at the archive again.
    """
    held = session.archive.held(topic)
    lost = _copy_live(session, topic, held)
    for _ in range(LOOKS_MORE if session.bus() else 0):
        if not lost:
            break
        session.archive.forget()
        held = session.archive.held(topic)
        lost = _copy_live(session, topic, held)
    if lost:
        session.warn(
            f"{topic}: neither the archive nor the log holds offsets {words(lost)}; "
            "they are missing in what follows"
        )
    if not held:
        _make_table(session, topic)
    session.files[topic] = held
    _make_view(session, topic, held)


def complete_topic(session: "Session", topic: str) -> bool:
    """Give the view of older files all columns of today, null where the files lack them; False if
    it has them.
    """
    names = _columns(session, topic)
    _make_table(session, topic)
    _make_view(session, topic, session.files[topic])
    return _columns(session, topic) != names


def define_evaluations(connection: duckdb.DuckDBPyConnection, place: Place) -> None:
    """A table of the lines of `metrics/eval.jsonl`; empty where there are none."""
    from storage.metrics import read_metrics

    columns = ", ".join(f"{name} {kind}" for name, kind in EVALUATION.items())
    connection.execute(f"CREATE TABLE evaluations ({columns}, line JSON)")
    lines = read_metrics(place.evaluations) if place.evaluations else []
    if lines:
        connection.execute(
            f"INSERT INTO evaluations BY NAME "
            f"SELECT unnest(from_json(line, {quoted(json.dumps(EVALUATION))})), line "
            "FROM (SELECT unnest($lines)::JSON AS line)",
            {"lines": [json.dumps(line) for line in lines]},
        )


def define_settings(connection: duckdb.DuckDBPyConnection, place: Place) -> None:
    """One row: the settings that views use, null where no configuration is there."""
    connection.execute("CREATE TABLE settings (run VARCHAR, max_lag BIGINT)")
    connection.execute("INSERT INTO settings VALUES (?, ?)", [place.run, place.max_lag])


def _copy_live(session: "Session", topic: str, held: Sequence[Held]) -> list[Hole]:
    """Copy what only the log has into `live_<topic>`; returns the offsets that nobody has."""
    bus = session.bus()
    if bus is None:
        return [hole for hole in holes(held, ()) if hole.end is not None]
    from rollstream.analysis import live

    lost: list[Hole] = []
    _drop_table(session, topic)
    wanted = holes(held, range(bus.partitions(topic))) if live.has_topic(bus, topic) else []
    for hole in wanted:
        for table in live.tables(bus, topic, hole, lost):
            _make_table(session, topic)
            _with_rows(session, f"INSERT INTO live_{topic}", topic, table)
    return lost


def _drop_table(session: "Session", topic: str) -> None:
    if topic in session.tables:
        session.connection.execute(f"DROP TABLE live_{topic}")
        session.tables.remove(topic)


def _make_table(session: "Session", topic: str) -> None:
    """An empty table with the topic's columns as they are today."""
    from storage.archive.shapes import arrow_schema

    if topic not in session.tables:
        empty: object = arrow_schema(topic).empty_table()
        _with_rows(session, f"CREATE TABLE live_{topic} AS", topic, empty)
        session.tables.add(topic)


def _with_rows(session: "Session", statement: str, topic: str, table: object) -> None:
    """Run a statement on Arrow rows, with the columns that the archive's paths give."""
    connection = session.connection
    connection.register("arrow_rows", table)
    named = "timestamp::DATE AS date, ?::VARCHAR AS run, ?::VARCHAR AS topic"
    connection.execute(
        f"{statement} SELECT *, {named} FROM arrow_rows", [session.archive.run(), topic]
    )
    connection.unregister("arrow_rows")


def _make_view(session: "Session", topic: str, held: Sequence[Held]) -> None:
    parts: list[str] = []
    if held:
        paths = ", ".join(quoted(one.path) for one in held)
        parts.append(f"SELECT * FROM read_parquet([{paths}], {HIVE}, union_by_name = true)")
    if topic in session.tables:
        parts.append(f"SELECT * FROM live_{topic}")
    union = " UNION ALL BY NAME ".join(parts)
    session.connection.execute(f"CREATE OR REPLACE VIEW {topic} AS {union}")


def _columns(session: "Session", topic: str) -> list[str]:
    return session.connection.sql(f"FROM {topic}").columns
