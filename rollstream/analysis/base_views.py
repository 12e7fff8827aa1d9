"""The base views of `rollstream query`: topics from archive and log, evaluations, settings."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from rollstream.analysis.archive_files import (
    ArchivedFiles,
    OffsetGap,
    ReadableFile,
    gaps_in_words,
    offset_gaps,
    sql_literal,
)
from rollstream.analysis.locate import RunLocation
from rollstream.analysis.views import MISPLACED
from rollstream.streams.topics import is_in_key_partition

if TYPE_CHECKING:  # imports numpy, which a query of the archive does not need
    from rollstream.storage.log_view import LogView

HIVE = "hive_partitioning = true, hive_types = {topic: VARCHAR, run: VARCHAR, date: DATE}"
EVALUATION_COLUMNS = {
    "step": "BIGINT",
    "seconds": "DOUBLE",
    "accuracy_sampled": "DOUBLE",
    "accuracy_greedy": "DOUBLE",
    "length_median": "DOUBLE",
    "length_p99": "DOUBLE",
    "shares": "MAP(VARCHAR, DOUBLE)",
}
"""Columns of `evaluations`, beside `line`, which holds the whole line as JSON."""


@dataclass(slots=True)
class TopicViews:
    """Defines one view per topic over archived files and over rows that only the log holds.

    `view` returns a view of log and archive, None without a log; `warn` receives messages for the
    user.
    """

    connection: duckdb.DuckDBPyConnection
    archive: ArchivedFiles
    view: "Callable[[], LogView | None]"
    warn: Callable[[str], None]
    _tables: set[str] = field(default_factory=set[str])
    """Topics that have a table `live_<topic>` of rows copied from the log, perhaps empty."""
    _files: dict[str, Sequence[ReadableFile]] = field(
        default_factory=dict[str, Sequence[ReadableFile]]
    )
    """The archived files that each topic's view reads; the store may hold newer ones by now."""

    def define(self, topic: str) -> None:
        """Define the topic's view, which has each row of archive and log exactly once. DuckDB reads
        the files that are listed now; `LogView` reads all other offsets, even if they are archived
        meanwhile.
        """
        held = self.archive.held(topic)
        lost = self._copy_others(topic, held)
        if lost:
            self.warn(
                f"{topic}: neither the archive nor the log holds offsets {gaps_in_words(lost)}; "
                "the result lacks these rows"
            )
        if not held:
            self._make_table(topic)
        self._files[topic] = held
        self._make_view(topic, held)

    def renew(self) -> bool:
        """Define each topic again whose files are gone because the archive merged them; False if
        all files are present.
        """
        gone = [t for t, of in self._files.items() if not all(Path(o.path).exists() for o in of)]
        self.archive.refresh()
        for topic in gone:
            self.connection.execute(f"DROP TABLE IF EXISTS live_{topic}")
            self._tables.discard(topic)
            self.define(topic)
        return bool(gone)

    def complete(self, topic: str) -> bool:
        """Add today's columns, as null, to a view over files that an older release wrote; False if
        the view has all columns already.
        """
        names = self._columns(topic)
        self._make_table(topic)
        self._make_view(topic, self._files[topic])
        return self._columns(topic) != names

    def _copy_others(self, topic: str, held: Sequence[ReadableFile]) -> Sequence[OffsetGap]:
        """Copy the rows that no file of `held` contains into `live_<topic>`; returns the offsets
        that neither archive nor log holds.
        """
        view = self.view()
        if view is None:
            return [gap for gap in offset_gaps(held, ()) if gap.end is not None]
        from rollstream.streams.records import Fence, Position

        if not view.has(topic):
            return []
        lost: list[OffsetGap] = []
        ends = view.end(topic)
        for gap in offset_gaps(held, range(view.partitions(topic))):
            end = ends.get(gap.partition, 0) if gap.end is None else gap.end
            start = {gap.partition: Position(gap.start, Fence(*gap.fence))}
            reader = view.topic(topic, start, skip_damaged=self.archive.skip_corrupt)
            for table in reader.tables({gap.partition: end}):
                self._make_table(topic)
                self._with_rows(f"INSERT INTO live_{topic} BY NAME", topic, table)
            holes = (h for h in reader.holes if h.start < h.end)
            lost += (OffsetGap(h.partition, h.start, h.end) for h in holes)
        return lost

    def _make_table(self, topic: str) -> None:
        """Create an empty table with the topic's columns of today, unless it exists."""
        from rollstream.storage.archive.schema import arrow_schema

        if topic not in self._tables:
            empty: object = arrow_schema(topic).empty_table()
            self._with_rows(f"CREATE TABLE live_{topic} AS", topic, empty)
            self._tables.add(topic)

    def _with_rows(self, statement: str, topic: str, table: object) -> None:
        """Run a statement on Arrow rows, with the columns that the archive's paths encode."""
        connection = self.connection
        connection.register("arrow_rows", table)
        named = "timestamp::DATE AS date, ?::VARCHAR AS run, ?::VARCHAR AS topic"
        connection.execute(
            f"{statement} SELECT *, {named} FROM arrow_rows", [self.archive.run(), topic]
        )
        connection.unregister("arrow_rows")

    def _make_view(self, topic: str, held: Sequence[ReadableFile]) -> None:
        parts: list[str] = []
        if held:
            paths = ", ".join(sql_literal(one.path) for one in held)
            parts.append(f"SELECT * FROM read_parquet([{paths}], {HIVE}, union_by_name = true)")
        if topic in self._tables:
            parts.append(f"SELECT * FROM live_{topic}")
        union = " UNION ALL BY NAME ".join(parts)
        self.connection.execute(f"CREATE OR REPLACE VIEW {topic} AS {union}")

    def _columns(self, topic: str) -> list[str]:
        return self.connection.sql(f"FROM {topic}").columns


def define_misplaced(connection: duckdb.DuckDBPyConnection, partitions: int) -> None:
    """Create the table of groups in a wrong partition of `trajectories`, whose rows the view
    `completions` leaves out; empty if the number of partitions is unknown (0).
    """
    wrong: list[tuple[int, int]] = []
    if partitions:
        query = 'SELECT DISTINCT "group", partition FROM trajectories WHERE "group" IS NOT NULL'
        found = connection.execute(query).fetchall()
        wrong = [(g, p) for g, p in found if not is_in_key_partition(g, p, partitions)]
    connection.execute(f'CREATE OR REPLACE TABLE {MISPLACED} ("group" BIGINT, partition INTEGER)')
    if wrong:
        groups, held = zip(*wrong, strict=True)
        connection.execute(
            f"INSERT INTO {MISPLACED} SELECT unnest(?::BIGINT[]), unnest(?::INTEGER[])",
            [list(groups), list(held)],
        )


def define_evaluations(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """Create the table of the lines of `metrics/eval.jsonl`, empty without such a file."""
    from rollstream.storage.metrics_file import read_metrics

    columns = ", ".join(f"{name} {kind}" for name, kind in EVALUATION_COLUMNS.items())
    connection.execute(f"CREATE TABLE evaluations ({columns}, line JSON)")
    lines = read_metrics(location.evaluations) if location.evaluations else []
    if lines:
        connection.execute(
            f"INSERT INTO evaluations BY NAME "
            f"SELECT unnest(from_json(line, {sql_literal(json.dumps(EVALUATION_COLUMNS))})), line "
            "FROM (SELECT unnest($lines)::JSON AS line)",
            {"lines": [json.dumps(line) for line in lines]},
        )


def define_settings(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """Create one row with the settings that views use, null without a configuration."""
    connection.execute("CREATE TABLE settings (run VARCHAR, max_lag BIGINT)")
    connection.execute("INSERT INTO settings VALUES (?, ?)", [location.run, location.max_lag])
