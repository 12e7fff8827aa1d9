"""The base views of `rollstream query`: one per archived topic, which has each row of archive and
log exactly once, and the tables `evaluations`, `settings` and `MISPLACED`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from rollstream.look.query import archive_files
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.record_times import with_known_times
from rollstream.look.query.views import MISPLACED
from rollstream.streams.topics import is_in_key_partition

if TYPE_CHECKING:  # imports numpy, which a query of the archive does not need
    from rollstream.storage.archive.log_view import LogView

HIVE = "hive_partitioning = true, hive_types = {topic: VARCHAR, run: VARCHAR, date: DATE}"
"""Paths of archived files encode the columns topic, run and date."""
EVALUATION_COLUMNS = {
    "step": "BIGINT",
    "seconds": "DOUBLE",
    "accuracy_sampled": "DOUBLE",
    "accuracy_greedy": "DOUBLE",
    "length_median": "DOUBLE",
    "length_p99": "DOUBLE",
    "shares": "MAP(VARCHAR, DOUBLE)",
    "prompts": "VARCHAR",
    "by_prompt": "DOUBLE[][]",
}
"""From the fields of the same names in a line of `eval.jsonl`. A further column `line` holds the
whole line as JSON.
"""


@dataclass(slots=True)
class TopicViews:
    """A session calls `define` when a query first names a topic; if the query fails, it calls
    `renew` (files were merged) or `complete` (files of an older release lack columns), and repeats
    it. `view` returns the reader of log and archive, None without a log.
    """

    connection: duckdb.DuckDBPyConnection
    archive: archive_files.ArchivedFiles
    view: "Callable[[], LogView | None]"
    warn: Callable[[str], None]
    _tables: set[str] = field(default_factory=set[str])
    """With a table `live_<topic>` of rows copied from the log, perhaps empty."""
    _files: dict[str, Sequence[archive_files.ReadableFile]] = field(
        default_factory=dict[str, Sequence[archive_files.ReadableFile]]
    )
    """That each topic's view reads; the store may hold newer ones."""

    def define(self, topic: str) -> None:
        """Defines over the files that the archive lists now."""
        files = self.archive.held(topic)
        # Rows at all other offsets are copied from the log, even if they are archived meanwhile: so
        # archive and log have no common row.
        lost = self._copy_others(topic, files)
        if lost:
            offsets = archive_files.gaps_in_words(lost)
            self.warn(
                f"{topic}: neither the archive nor the log holds offsets {offsets}; "
                "the result lacks these rows"
            )
        if not files:
            self._make_table(topic)
        self._files[topic] = files
        self._make_view(topic, files)

    def renew(self) -> bool:
        """Those whose files are gone because the archive merged them. False if no file was gone."""
        gone = [t for t, of in self._files.items() if not all(Path(o.path).exists() for o in of)]
        self.archive.refresh()
        for topic in gone:
            self.connection.execute(f"DROP TABLE IF EXISTS live_{topic}")
            self._tables.discard(topic)
            self.define(topic)
        return bool(gone)

    def complete(self, topic: str) -> bool:
        """Adds the columns of this release that files of an older one lack, as null. False if the
        view had all.
        """
        names = self._columns(topic)
        self._make_table(topic)
        self._make_view(topic, self._files[topic])
        return self._columns(topic) != names

    def _copy_others(
        self, topic: str, files: Sequence[archive_files.ReadableFile]
    ) -> Sequence[archive_files.OffsetGap]:
        """Returns offsets that neither archive nor log holds."""
        view = self.view()
        if view is None:
            return [gap for gap in archive_files.offset_gaps(files, ()) if gap.end is not None]
        from rollstream.streams.records import Fence, Position

        if not view.has(topic):
            return []
        lost: list[archive_files.OffsetGap] = []
        ends = view.end(topic)
        for gap in archive_files.offset_gaps(files, range(view.partitions(topic))):
            end = ends.get(gap.partition, 0) if gap.end is None else gap.end
            start = {gap.partition: Position(gap.start, Fence(*gap.fence))}
            reader = view.topic(topic, start, skip_damaged=self.archive.skip_corrupt)
            for table in reader.tables({gap.partition: end}):
                self._make_table(topic)
                self._with_rows(f"INSERT INTO live_{topic} BY NAME", topic, with_known_times(table))
            holes = (h for h in reader.holes if h.start < h.end)
            lost += (archive_files.OffsetGap(h.partition, h.start, h.end) for h in holes)
        return lost

    def _make_table(self, topic: str) -> None:
        from rollstream.storage.archive.schema import arrow_schema

        if topic not in self._tables:
            # With this release's columns, also where no row is copied.
            empty: object = arrow_schema(topic).empty_table()
            self._with_rows(f"CREATE TABLE live_{topic} AS", topic, empty)
            self._tables.add(topic)

    def _with_rows(self, statement: str, topic: str, table: object) -> None:
        connection = self.connection
        connection.register("arrow_rows", table)
        # The columns of `HIVE`, which archived rows have from their paths.
        columns = "timestamp::DATE AS date, ?::VARCHAR AS run, ?::VARCHAR AS topic"
        connection.execute(
            f"{statement} SELECT *, {columns} FROM arrow_rows", [self.archive.run(), topic]
        )
        connection.unregister("arrow_rows")

    def _make_view(self, topic: str, files: Sequence[archive_files.ReadableFile]) -> None:
        parts: list[str] = []
        if files:
            paths = ", ".join(archive_files.sql_literal(file.path) for file in files)
            parts.append(f"SELECT * FROM read_parquet([{paths}], {HIVE}, union_by_name = true)")
        if topic in self._tables:
            parts.append(f"SELECT * FROM live_{topic}")
        union = " UNION ALL BY NAME ".join(parts)
        self.connection.execute(f"CREATE OR REPLACE VIEW {topic} AS {union}")

    def _columns(self, topic: str) -> list[str]:
        return self.connection.sql(f"FROM {topic}").columns


def define_misplaced(connection: duckdb.DuckDBPyConnection, partitions: int) -> None:
    """The table `MISPLACED` of groups with rows in a partition of `trajectories` that does not
    belong to their key; empty if the number of partitions is unknown (0).
    """
    wrong: list[tuple[int, int]] = []
    if partitions:
        query = 'SELECT DISTINCT "group", partition FROM trajectories WHERE "group" IS NOT NULL'
        rows = connection.execute(query).fetchall()
        # The view `completions` leaves these rows out, as the trainer does.
        wrong = [(g, p) for g, p in rows if not is_in_key_partition(g, p, partitions)]
    connection.execute(f'CREATE OR REPLACE TABLE {MISPLACED} ("group" BIGINT, partition INTEGER)')
    if wrong:
        groups, wrong_partitions = zip(*wrong, strict=True)
        connection.execute(
            f"INSERT INTO {MISPLACED} SELECT unnest(?::BIGINT[]), unnest(?::INTEGER[])",
            [list(groups), list(wrong_partitions)],
        )


def define_evaluations(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """Defines the evaluations from `metrics/eval.jsonl`, empty without that file."""
    from rollstream.storage.metrics_file import read_metrics

    columns = ", ".join(f"{name} {kind}" for name, kind in EVALUATION_COLUMNS.items())
    connection.execute(f"CREATE TABLE evaluations ({columns}, line JSON)")
    lines = read_metrics(location.evaluations) if location.evaluations else []
    if lines:
        shape = archive_files.sql_literal(json.dumps(EVALUATION_COLUMNS))
        connection.execute(
            f"INSERT INTO evaluations BY NAME "
            f"SELECT unnest(from_json(line, {shape})), line "
            "FROM (SELECT unnest($lines)::JSON AS line)",
            {"lines": [json.dumps(line) for line in lines]},
        )


def define_settings(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """One row, null without a configuration."""
    columns = "run VARCHAR, max_lag BIGINT, process_rewards BOOLEAN"
    connection.execute(f"CREATE TABLE settings ({columns})")
    values = [location.run, location.max_lag, location.process_rewards]
    connection.execute("INSERT INTO settings VALUES (?, ?, ?)", values)
