"""Holds the light columns of a run's trajectories, groups, takes and steps in a DuckDB file of its
own (`RunIndex`), so that no view reads the run again. `ingest.py` fills it from the run's reader.

The file is temporary; DuckDB's memory is bounded by `MEMORY`, whatever the size of the run. One
thread writes (`insert` and `execute`), any thread reads (`rows`); a reader sees whole batches only.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from rollstream.analysis.output import json_value
from rollstream.temporary_folder import TemporaryFolder

MEMORY = "96MB"  # of DuckDB, in which it keeps pages and hash tables; the rest is on disk
THREADS = 2
Kept = TypeVar("Kept")
SPILL = "8GB"

TABLES = """
CREATE TABLE t (
    trajectory VARCHAR, "group" BIGINT, index INTEGER, attempt INTEGER, task VARCHAR,
    rollout VARCHAR, rollout_term INTEGER, finish VARCHAR, reason VARCHAR, reward DOUBLE,
    tokens INTEGER, version INTEGER, version_last INTEGER, version_oldest INTEGER,
    trainer_version INTEGER, step INTEGER, started_s DOUBLE, finished_s DOUBLE, wave INTEGER,
    moves INTEGER, guessed INTEGER, accepted INTEGER, appended_s DOUBLE, p INTEGER, o BIGINT
);
CREATE TABLE admitted (
    "group" BIGINT, wave INTEGER, admitted_s DOUBLE, deadline_s DOUBLE, names VARCHAR[],
    prompt_p INTEGER, prompt_o BIGINT
);
CREATE TABLE ends (
    "group" BIGINT, ended VARCHAR, detail VARCHAR, step INTEGER, time_s DOUBLE, p INTEGER, o BIGINT
);
CREATE TABLE members (step INTEGER, update INTEGER, micro_batch INTEGER, p INTEGER, o BIGINT);
CREATE TABLE takes (
    step INTEGER, update INTEGER, micro_batch INTEGER, term INTEGER, time_s DOUBLE,
    trajectories INTEGER, groups BIGINT[], p INTEGER, o BIGINT
);
CREATE TABLE superseded (step INTEGER, update INTEGER, micro_batch INTEGER);
CREATE TABLE done (
    step INTEGER, term INTEGER, time_s DOUBLE, version INTEGER, version_term INTEGER,
    takes INTEGER, metrics MAP(VARCHAR, DOUBLE), counts MAP(VARCHAR, BIGINT),
    state_hash VARCHAR, weights_hash VARCHAR, p INTEGER, o BIGINT
);
CREATE TABLE noted (
    trajectory VARCHAR, "group" BIGINT, name VARCHAR, value DOUBLE, count INTEGER, scorer VARCHAR,
    reason VARCHAR, time_s DOUBLE, p INTEGER, o BIGINT
);
CREATE TABLE served (
    time_s DOUBLE, rollout VARCHAR, rollout_term INTEGER, version INTEGER, version_term INTEGER,
    seconds DOUBLE, checked VARCHAR, tensors INTEGER
);
CREATE TABLE opened (time_s DOUBLE, role VARCHAR, term INTEGER, topic VARCHAR, p INTEGER);
"""
STEPS = """
CREATE VIEW steps AS SELECT * FROM done
QUALIFY row_number() OVER (PARTITION BY step ORDER BY term DESC, o DESC) = 1
"""
"""The newest record of each step: a crash repeats a step."""
ENDED = """
CREATE VIEW ended AS SELECT * FROM ends
QUALIFY row_number() OVER (
    PARTITION BY "group" ORDER BY starts_with(detail, 'poisoned: ') DESC, o) = 1
"""
"""The end of each group, as in the view `groups` of `rollstream query`."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """States how many of a run's `total` completions were read, and whether the index has once had
    all that the run held when the reading began.
    """

    trajectories: int = 0
    total: int = 0
    complete: bool = False

    def line(self) -> dict[str, Any]:
        """Returns the progress as a JSON object."""
        total = max(self.total, self.trajectories)
        return {"trajectories": self.trajectories, "total": total, "complete": self.complete}


class RunIndex:
    """Holds the index of one run; close it to delete its file. Rows of `t` are first completions in
    the partition of their group (invariant 2), without void and unreadable ones; `p` and `o` are a
    record's partition and offset.
    """

    def __init__(self) -> None:
        self._temporary = TemporaryFolder("explorer")
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
        """Grows with every batch that changed the index."""
        self._connection.execute("SET GLOBAL TimeZone = 'UTC'")
        for statement in (TABLES, STEPS, ENDED):
            self._connection.execute(statement)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Returns the rows of a query as JSON objects by column; NaN is None."""
        cursor = self.cursor().execute(sql, list(parameters))
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, map(json_value, row), strict=True)) for row in cursor.fetchall()]

    def columns(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, list[Any]]:
        """Returns the rows of a query as one list per column."""
        cursor = self.cursor().execute(sql, list(parameters))
        names = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchall()
        return {name: [json_value(row[at]) for row in rows] for at, name in enumerate(names)}

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, Any] | None:
        """Returns the first row of a query; None if it has none."""
        return next(iter(self.rows(sql, parameters)), None)

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Returns the first value of the first row; None if there is none."""
        found = self.cursor().execute(sql, list(parameters)).fetchall()
        return found[0][0] if found else None

    def unchanged(self, name: str, compute: Callable[[], Kept]) -> Kept:
        """Returns `compute()`, or its last result under this name if the index has not changed."""
        changes = self.changes
        found = self._memo.get(name)
        if found is None or found[0] != changes:
            found = self._memo[name] = (changes, compute())
        return found[1]

    def insert(
        self, sql: str, table: pa.Table, parameters: Mapping[str, Any] | None = None
    ) -> None:
        """Run a statement that reads the Arrow table under the name `batch`. Only the thread that
        ingests calls it.
        """
        cursor = self.cursor()
        cursor.register("batch", table)
        try:
            cursor.execute(sql, parameters or {}).fetchall()
        finally:
            cursor.unregister("batch")
        self.changes += 1

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement that changes the index. Only the thread that ingests calls it."""
        self.cursor().execute(sql, list(parameters)).fetchall()
        self.changes += 1

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Returns this thread's own cursor."""
        if not hasattr(self._cursors, "own"):
            self._cursors.own = self._connection.cursor()
        return self._cursors.own

    def close(self) -> None:
        self._connection.close()
        self._temporary.close()
