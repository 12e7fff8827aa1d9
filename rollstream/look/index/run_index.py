"""The light columns of a run in a temporary DuckDB file, by the rules of
`storage/archive/run_rules.py`. DuckDB's memory is bounded by `MEMORY` for a run of any size.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from rollstream.look.index.tables import TABLES, VIEWS, light_batch
from rollstream.look.query.output import json_value
from rollstream.temporary_folder import TemporaryFolder

# DuckDB's pages and hash tables; the rest is on disk.
MEMORY = "96MB"
THREADS = 2
Kept = TypeVar("Kept")
SPILL = "8GB"


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """The progress in the run's `total` completions; whether the index has once been complete."""

    trajectories: int = 0
    total: int = 0
    complete: bool = False

    def line(self) -> dict[str, Any]:
        total = max(self.total, self.trajectories)
        return {"trajectories": self.trajectories, "total": total, "complete": self.complete}


class RunIndex:
    """One thread writes (`insert`, `execute`), any thread reads; a reader sees whole batches only.
    Rows of `t` are first completions in the partition of their group (invariant 2), without void
    and unreadable ones; `p` and `o` are a record's partition and offset. `max_lag` and
    `process_rewards` are the run's settings.
    """

    def __init__(self, max_lag: int | None = None, process_rewards: bool = False) -> None:
        self._temporary = TemporaryFolder("index")
        self._folder = self._temporary.path
        self._connection = duckdb.connect(
            str(self._folder / "index.duckdb"),
            config={
                "memory_limit": MEMORY,
                "threads": THREADS,
                "max_temp_directory_size": SPILL,
                "temp_directory": str(self._folder / "spill"),
                "autoinstall_known_extensions": "false",
                "preserve_insertion_order": "false",
                "parquet_metadata_cache": "true",
                "write_buffer_row_group_count": "1",
                "allocator_flush_threshold": "16MiB",
                "allocator_bulk_deallocation_flush_threshold": "16MiB",
            },
        )
        self._cursors = threading.local()
        self._memo: dict[str, tuple[int, Any]] = {}
        self.progress = IndexProgress()
        self.changes = 0
        self._connection.execute("SET GLOBAL TimeZone = 'UTC'")
        self._connection.execute(
            "CREATE TABLE settings AS SELECT ?::BIGINT AS max_lag, ? AS process_rewards",
            [max_lag, process_rewards],
        )
        for name, table in TABLES.items():
            self.insert(table.creation(name), light_batch(table.topics[0], None))
        for name, query in VIEWS.items():
            self._connection.execute(f"CREATE VIEW {name} AS {query}")

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Returns the rows by column name; NaN is None."""
        cursor = self.cursor().execute(sql, list(parameters))
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, map(json_value, row), strict=True)) for row in cursor.fetchall()]

    def columns(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, list[Any]]:
        cursor = self.cursor().execute(sql, list(parameters))
        names = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchall()
        return {name: [json_value(row[at]) for row in rows] for at, name in enumerate(names)}

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, Any] | None:
        return next(iter(self.rows(sql, parameters)), None)

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        rows = self.cursor().execute(sql, list(parameters)).fetchall()
        return rows[0][0] if rows else None

    def unchanged(self, name: str, compute: Callable[[], Kept]) -> Kept:
        """`compute()`, or its last result under this name if the index has not changed."""
        changes = self.changes
        memo = self._memo.get(name)
        if memo is None or memo[0] != changes:
            memo = self._memo[name] = (changes, compute())
        return memo[1]

    def insert(
        self, sql: str, table: pa.Table, parameters: Mapping[str, Any] | None = None
    ) -> None:
        """Reads the Arrow table as `batch`, with those of the `parameters` that the statement
        names.
        """
        cursor = self.cursor()
        cursor.register("batch", table)
        named = {name: n for name, n in (parameters or {}).items() if f"${name}" in sql}
        try:
            cursor.execute(sql, named).fetchall()
        finally:
            cursor.unregister("batch")
        self.changes += 1

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self.cursor().execute(sql, list(parameters)).fetchall()
        self.changes += 1

    def cursor(self) -> duckdb.DuckDBPyConnection:
        # A DuckDB connection serves one thread at a time.
        if not hasattr(self._cursors, "own"):
            self._cursors.own = self._connection.cursor()
        return self._cursors.own

    def close(self) -> None:
        self._connection.close()
        self._temporary.close()

    def __enter__(self) -> "RunIndex":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
