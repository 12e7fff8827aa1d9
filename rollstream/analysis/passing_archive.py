"""Reads archived rows for `tail`, for runs whose log no longer exists."""
# duckdb and pyarrow ship few types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Iterator

import pyarrow as pa

from rollstream.analysis.tail import TailRecord
from rollstream.analysis.records import archive_tables
from rollstream.analysis.session import QuerySession
from rollstream.storage.archive.tables import records_of


def archived_tail(session: QuerySession, topic: str, where: str) -> Iterator[TailRecord]:
    """Yields the rows that meet an SQL condition, by time."""
    sql = f'SELECT * FROM {topic} WHERE {where} ORDER BY timestamp, partition, "offset"'
    for table in archive_tables(session, sql, topic):
        yield from _tail_records(table)


def _tail_records(table: pa.Table) -> Iterator[TailRecord]:
    envelope = table.select(
        ["partition", "offset", "timestamp", "key", "schema", "term", "void", "reason"]
    )
    records = records_of(table, with_void=True)
    stamps = table.column("timestamp").cast(pa.int64()).to_pylist()
    for row, stamp in zip(envelope.to_pylist(), stamps, strict=True):
        is_record = row["reason"] is None and row["schema"] is not None
        yield TailRecord(
            row["partition"],
            row["offset"],
            stamp,
            row["key"],
            next(records) if is_record else None,
            row["term"],
            row["void"],
            row["reason"] or "",
        )
