"""Converts a session's rows back to trajectory records."""
# duckdb and pyarrow ship few types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from rollstream.analysis.session import QuerySession
from rollstream.storage.archive.tables import records_of
from rollstream.storage.archive.schema import arrow_schema
from rollstream.streams.records import Trajectory

BATCH_ROWS = 256  # per batch in memory
TOPIC = "trajectories"


def trajectory_records(
    session: QuerySession, where: str | None = None, view: str = "completions"
) -> Iterator[Trajectory]:
    """Yields the records of a view's rows that meet an SQL condition, archived rows first."""
    wanted = "true" if where is None else where
    sql = f"SELECT * FROM {view} WHERE ({wanted}) AND reason IS NULL AND NOT void"
    for table in archive_tables(session, sql):
        for record in records_of(table):
            if isinstance(record, Trajectory):
                yield record


def archive_tables(session: QuerySession, sql: str, topic: str = TOPIC) -> Iterator[pa.Table]:
    """Yields a query's rows in batches, with a topic's archive columns. Columns that are newer than
    the archive's files are missing.
    """
    reader: Any = session.arrow(sql, lambda relation: relation.to_arrow_reader(BATCH_ROWS))
    present = set(reader.schema.names)
    schema = pa.schema([field for field in arrow_schema(topic) if field.name in present])
    try:
        for batch in reader:
            yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)
    except (pa.ArrowException, OSError):  # DuckDB's errors, wrapped by Arrow
        session.check()
        raise
