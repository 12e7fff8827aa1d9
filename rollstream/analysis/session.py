"""One look at a run: a DuckDB in memory in which each view is defined when a query first names it.

Files of the archive are read in place; rows that only the log has are copied in once, when their
topic is first asked for, so a session sees one state of each topic. Only queries are run, nothing
is written. A file that cannot be read is named, or with `skip_corrupt` left out with a warning.
"""
# duckdb ships few types
# pyright: reportUnknownMemberType=false

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb

from rollstream.analysis.place import Place
from rollstream.analysis.statements import explained, is_of_data, the_query
from rollstream.analysis.views import TOPICS, VIEWS, in_order, named_in, uses_text

if TYPE_CHECKING:  # what reads archive, log and tokens is imported when a question needs it
    from rollstream.analysis.archived import Archive
    from rollstream.analysis.rows import TopicViews
    from streams.bus import Bus

OPTIONS = {"autoinstall_known_extensions": "false"}  # a question goes to no other machine
BATCH = 2048  # rows that a question's answer is handed over by
ZONED = "TIMESTAMP WITH TIME ZONE"
Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Answer:
    """Names and DuckDB's types of the columns, and the rows, to be read once. Times are UTC."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    batches: Iterator[list[tuple[Any, ...]]]


class Session:
    """`warn` tells the person what is done with less or more than was asked for. One thread."""

    def __init__(
        self, place: Place, warn: Callable[[str], None], skip_corrupt: bool = False
    ) -> None:
        self.place = place
        self.warn = warn
        spill = f"{os.environ.get('TMPDIR', '/tmp')}/rollstream-query-{os.getpid()}"
        self.connection = duckdb.connect(":memory:", config={**OPTIONS, "temp_directory": spill})
        self.connection.execute("SET GLOBAL TimeZone = 'UTC'")
        self.skip_corrupt = skip_corrupt
        self._defined: set[str] = set()
        self._bus: Bus | None = None

    def answer(self, sql: str) -> Answer:
        """The rows of one query, as Python values, batch by batch.

        `ConfigurationError` says what is wrong with the query, `CorruptObject` which file is.
        """
        with self._explained(sql):
            text = the_query(sql)
            cursor = self._run(text, lambda text: self.connection.cursor().execute(text))
            names = tuple(column[0] for column in cursor.description or ())
            kinds = tuple(str(column[1]) for column in cursor.description or ())
            if ZONED in kinds:  # DuckDB gives these to Python by a library that we need not have
                cursor.execute(_without_zones(text, kinds))
        return Answer(names, kinds, self._batches(cursor, sql))

    def arrow(self, sql: str, take: Callable[[duckdb.DuckDBPyRelation], Taken]) -> Taken:
        """What `take` makes of the relation; errors as those of `answer`."""
        with self._explained(sql):
            return self._run(the_query(sql), lambda text: take(self.connection.cursor().sql(text)))

    def columns(self, view: str) -> dict[str, str]:
        """A view's columns and their types."""
        self.define([view])
        relation = self.connection.sql(f"FROM {view}")
        return dict(zip(relation.columns, map(str, relation.types), strict=True))

    def check(self) -> None:
        """Read the archived files that were asked so far: `CorruptObject` names a damaged one."""
        for topic in self._topics():
            self.archive.check(topic)

    def define(self, names: Iterable[str]) -> None:
        """Make these views and what they read."""
        for name in in_order(names):
            self._define_once(name, lambda name=name: self._define(name))

    @cached_property
    def archive(self) -> "Archive":
        from rollstream.analysis.archived import Archive

        return Archive(self.place, self.connection, self.skip_corrupt, self.warn)

    @cached_property
    def _topic_views(self) -> "TopicViews":
        from rollstream.analysis.rows import TopicViews

        return TopicViews(self.connection, self.archive, self.bus, self.warn)

    def bus(self) -> "Bus | None":
        """The run's log, opened once; None where there is none."""
        if self._bus is None and self.place.bus is not None:
            from rollstream.analysis.live import open_log

            self._bus = open_log(self.place)
        return self._bus

    def close(self) -> None:
        self.connection.close()
        if self._bus is not None:
            self._bus.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _batches(
        self, cursor: duckdb.DuckDBPyConnection, sql: str
    ) -> Iterator[list[tuple[Any, ...]]]:
        with self._explained(sql):
            while rows := cursor.fetchmany(BATCH):
                yield rows

    @contextmanager
    def _explained(self, sql: str) -> Generator[None]:
        """DuckDB's errors as the project's; a damaged file is looked for where it may be one."""
        try:
            yield
        except duckdb.Error as error:
            if is_of_data(error):
                self.check()
            raise explained(error, sql) from None

    def _run(self, sql: str, run: Callable[[str], Taken]) -> Taken:
        """What `run` makes of a query whose views are defined. Files that an older program wrote
        may lack columns of today: then the views are made again with all of them.
        """
        if uses_text(sql):
            self._define_once("text_of", self._define_text)
        try:
            self.define(named_in(sql))
            return run(sql)
        except duckdb.BinderException:
            if not self._completed():
                raise
        self.define(named_in(sql))
        return run(sql)

    def _topics(self) -> list[str]:
        return [topic for topic in TOPICS if topic in self._defined]

    def _define_once(self, name: str, make: Callable[[], None]) -> None:
        if name not in self._defined:
            make()
            self._defined.add(name)

    def _define(self, name: str) -> None:
        if VIEWS[name].query:
            try:
                self._derive(name)
            except duckdb.BinderException:
                if not self._completed():
                    raise
                self._derive(name)
            return
        from rollstream.analysis import rows

        if name in TOPICS:
            self._topic_views.define(name)
        elif name == "evaluations":
            rows.define_evaluations(self.connection, self.place)
        else:
            rows.define_settings(self.connection, self.place)

    def _derive(self, name: str) -> None:
        self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS {VIEWS[name].query}")

    def _completed(self) -> bool:
        """Give topics of older files the columns of today, and make what was derived from them
        anew; False if they had them.
        """
        if not [topic for topic in self._topics() if self._topic_views.complete(topic)]:
            return False
        for name in in_order(self._defined & VIEWS.keys()):
            if name in self._defined and VIEWS[name].query:
                self._derive(name)
        return True

    def _define_text(self) -> None:
        from rollstream.analysis.text import define_text

        define_text(self.connection, self.place)


def _without_zones(sql: str, kinds: Sequence[str]) -> str:
    """The query with its times as plain UTC ones, columns by place."""
    columns = [f"c{place}" for place in range(len(kinds))]
    chosen = [
        f"{column}::TIMESTAMP" if kind == ZONED else column
        for column, kind in zip(columns, kinds, strict=True)
    ]
    return f"SELECT {', '.join(chosen)} FROM ({sql}\n) AS t({', '.join(columns)})"
