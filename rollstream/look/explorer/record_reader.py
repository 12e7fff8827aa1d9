"""Reads single records of a run by their places, from any thread: from the archive by DuckDB, which
reads only the row group with the place, or from the log.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollstream.errors import RollstreamError
from rollstream.look.index.run_index import RunIndex
from rollstream.look.monitor.feed import positions_since
from rollstream.look.query.archive_files import ArchivedFiles, ReadableFile, sql_literal
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.looking import open_run_view
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.segments import ArchivedRows, LogRecord
from rollstream.streams.records import Trajectory
from rollstream.streams.topics import ARCHIVED_TOPICS

SCANNED_MAX = 200_000  # messages of one scan by time


@dataclass(frozen=True, slots=True)
class TokenRow:
    offset: int
    tokens: NDArray[np.uint32]
    sources: NDArray[np.uint8]


class RecordReader:
    """Serves one thread at a time, others wait. `notes` are messages for the user, for instance
    that archived files are fetched.
    """

    def __init__(self, location: RunLocation, index: RunIndex) -> None:
        self._location, self._index = location, index
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._view: LogView | None = None
        self._files: dict[str, list[ReadableFile]] = {}
        self.notes: list[str] = []

    def record(self, topic: str, partition: int, offset: int) -> LogRecord | None:
        """Returns the message at a place; None if neither log nor archive holds it."""
        return next(iter(self.records(topic, partition, [offset])), None)

    def records(self, topic: str, partition: int, offsets: Sequence[int]) -> list[LogRecord]:
        """Returns the messages at these offsets of one partition, as far as they are held."""
        if not offsets:
            return []
        with self._lock:
            view = self._reader()
            begin = self._begin(view, topic, partition)
            messages: list[LogRecord] = []
            old = sorted(o for o in offsets if o < begin)
            if old:
                messages += self._archived(topic, partition, old)
            for offset in sorted(o for o in offsets if o >= begin):
                reader = view.topic(topic, {partition: offset}, skip_damaged=True)
                messages += reader.messages({partition: offset + 1})
            return messages

    def tokens(self, partition: int, start: int, end: int) -> Iterator[TokenRow]:
        with self._lock:
            view = self._reader()
            begin = self._begin(view, "trajectories", partition)
            rows: list[TokenRow] = []
            if start < begin:
                where = f'"offset" >= {start} AND "offset" < {min(end, begin)}'
                columns = '"offset", tokens, sources'
                for batch in self._select("trajectories", partition, (start, end), where, columns):
                    rows += _token_rows(batch)
            if end > begin:
                reader = view.topic("trajectories", {partition: max(start, begin)})
                for message in reader.messages({partition: end}):
                    if isinstance(message.record, Trajectory):
                        place = message.address.offset
                        rows.append(TokenRow(place, message.record.tokens, message.record.sources))
        # The consumer may be slow: it runs without the lock.
        yield from rows

    def tokens_at(self, partition: int, offsets: Sequence[int]) -> list[TokenRow]:
        if not offsets:
            return []
        with self._lock:
            view = self._reader()
            begin = self._begin(view, "trajectories", partition)
            rows: list[TokenRow] = []
            old = sorted(offset for offset in offsets if offset < begin)
            if old:
                where = f'"offset" IN ({", ".join(map(str, old))})'
                span, columns = (old[0], old[-1] + 1), '"offset", tokens, sources'
                for batch in self._select("trajectories", partition, span, where, columns):
                    rows += _token_rows(batch)
        for message in self.records("trajectories", partition, [o for o in offsets if o >= begin]):
            if isinstance(message.record, Trajectory):
                rows.append(
                    TokenRow(message.address.offset, message.record.tokens, message.record.sources)
                )
        return rows

    def scan(
        self, topic: str, since_s: float, until_s: float, partition: int | None = None
    ) -> tuple[list[LogRecord], bool]:
        """Returns the messages that were appended between two times, of one partition or of all,
        and whether all of them are still in the log. Without a log it returns none.
        """
        with self._lock:
            view = self._reader()
            if view.bus is None or not view.has(topic):
                return [], False
            start = positions_since(view.bus, topic, since_s)
            until = positions_since(view.bus, topic, until_s)
            begin, end = view.bus.begin(topic), view.bus.end(topic)
            partitions = [p for p in start if partition in (None, p)]
            is_complete = all(start[p] > begin[p] or begin[p] == 0 for p in partitions)
            messages: list[LogRecord] = []
            for p in partitions:
                stop = min(until.get(p, end[p]), start[p] + SCANNED_MAX)
                if start[p] < stop:
                    reader = view.topic(topic, {p: start[p]}, skip_damaged=True)
                    messages += reader.messages({p: stop})
            return messages, is_complete

    def newest(self, topic: str) -> dict[str, LogRecord]:
        """Returns the newest record of each key of a compacted topic; {} without a log."""
        with self._lock:
            view = self._reader()
            if view.bus is None or not view.has(topic):
                return {}
            begin = view.bus.begin(topic)
            reader = view.topic(topic, begin, skip_damaged=True)
            return {
                message.key: message for message in reader.messages() if message.record is not None
            }

    def partitions(self, topic: str) -> int:
        """Returns over how many partitions the run spreads the topic; 0 if unknown."""
        with self._lock:
            view = self._reader()
            return view.bus.partitions(topic) if view.bus and view.has(topic) else 0

    def close(self) -> None:
        with self._lock:
            self._opened.close()

    def _reader(self) -> LogView:
        if self._view is None:
            self._view = self._opened.enter_context(open_run_view(self._location))
        return self._view

    def _begin(self, view: LogView, topic: str, partition: int) -> int:
        if view.bus is None or not view.has(topic):
            # Without a log every offset is below it, so all are read from the archive.
            return 1 << 62
        return view.bus.begin(topic).get(partition, 1 << 62)

    def _archived(self, topic: str, partition: int, offsets: Sequence[int]) -> list[LogRecord]:
        if topic not in ARCHIVED_TOPICS:
            return []
        listed = ", ".join(map(str, offsets))
        where = f'"offset" IN ({listed})'
        messages: list[LogRecord] = []
        span = (offsets[0], offsets[-1] + 1)
        try:
            batches = self._select(topic, partition, span, where, "*")
        except duckdb.ConversionException:
            # DuckDB lacks a time of one of these rows, perhaps of another.
            for offset in offsets:
                reader = self._reader().topic(topic, {partition: offset}, skip_damaged=True)
                messages += reader.messages({partition: offset + 1})
            return messages
        for batch in batches:
            for row in range(batch.num_rows):
                messages += ArchivedRows(topic, partition, batch.slice(row, 1), "").records()
        return sorted(messages, key=lambda message: message.address.offset)

    def _select(
        self, topic: str, partition: int, span: tuple[int, int], where: str, columns: str
    ) -> list[pa.RecordBatch]:
        for attempt in range(2):
            try:
                files = self._held(topic, is_retry=attempt > 0)
                literals = [
                    sql_literal(file.path)
                    for file in files
                    if file.partition == partition and file.first < span[1] and file.last >= span[0]
                ]
                if not literals:
                    continue
                paths = ", ".join(literals)
                sql = (
                    f"SELECT {columns} FROM read_parquet([{paths}], union_by_name = true, "
                    f'hive_partitioning = false) WHERE {where} ORDER BY "offset"'
                )
                relation: Any = self._index.cursor().sql(sql)
                return _in_archive_columns(relation.to_arrow_table(), topic)
            except duckdb.IOException:
                # The files were merged with others meanwhile: they are listed again once.
                if attempt:
                    raise
        return []

    def _held(self, topic: str, is_retry: bool) -> Sequence[ReadableFile]:
        if is_retry or topic not in self._files:
            cursor = self._index.cursor()
            files = ArchivedFiles(self._location, cursor, False, self.notes.append)
            try:
                self._files[topic] = files.held(topic)
            except RollstreamError:
                self._files.pop(topic, None)
                raise
        return self._files[topic]


def _in_archive_columns(table: pa.Table, topic: str) -> list[pa.RecordBatch]:
    from rollstream.storage.archive.schema import arrow_schema

    fields: Mapping[str, Any] = {field.name: field for field in arrow_schema(topic)}
    schema = pa.schema([fields[name] for name in table.schema.names if name in fields])
    return table.select(schema.names).cast(schema).combine_chunks().to_batches()


def _token_rows(batch: pa.RecordBatch) -> Iterator[TokenRow]:
    offsets = batch.column("offset").to_pylist()
    arrays: list[tuple[Any, list[int]]] = []
    for name in ("tokens", "sources"):
        column: Any = batch.column(name)
        arrays.append((column.values.to_numpy(zero_copy_only=True), column.offsets.to_pylist()))
    (tokens, at), (sources, source_at) = arrays
    for row, offset in enumerate(offsets):
        yield TokenRow(
            offset,
            tokens[at[row] : at[row + 1]],
            sources[source_at[row] : source_at[row + 1]],
        )
