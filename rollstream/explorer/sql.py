"""Answers free SQL about a run (`FreeSql`), only where `--sql` allows it. One query at a time, with
bounded memory, time and rows; it can read the run's archived files and no other file.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import duckdb

from rollstream.analysis.archive_files import sql_literal
from rollstream.analysis.locate import RunLocation
from rollstream.analysis.output import json_value
from rollstream.analysis.session import QuerySession
from rollstream.analysis.views import VIEWS
from rollstream.errors import ConfigurationError
from rollstream.explorer.filters import WrongRequest
from rollstream.streams.topics import ARCHIVED_TOPICS

QUERY_S = 10.0
ROWS_MAX, BYTES_MAX = 1000, 2 << 20
MEMORY = "192MB"
RENEW_S = 30.0  # a session sees the log as of its opening; after this time a new one is opened


class FreeSql:
    """Holds a session for queries about one run, opened at the first one."""

    def __init__(self, location: RunLocation, warn: Callable[[str], None]) -> None:
        self._location, self._warn = location, warn
        self._lock = threading.Lock()
        self._session: QuerySession | None = None
        self._opened_s = 0.0

    def answer(self, sql: str) -> dict[str, Any]:
        """Returns the first rows of a query. Raises `WrongRequest` if it is wrong, takes too long
        or needs too much memory.
        """
        if not self._lock.acquire(timeout=QUERY_S):
            raise WrongRequest("another query is running; try again")
        try:
            started = time.monotonic()
            found = self._run(self._current(), sql)
            return {**found, "seconds": round(time.monotonic() - started, 4)}
        finally:
            self._lock.release()

    def views(self) -> list[dict[str, Any]]:
        """Returns the views with their columns."""
        with self._lock:
            session = self._current()
            return [
                {
                    "name": view.name,
                    "sentence": view.sentence,
                    "columns": session.columns(view.name),
                }
                for view in VIEWS.values()
            ]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _current(self) -> QuerySession:
        if self._session is None or time.monotonic() - self._opened_s > RENEW_S:
            self._end()
            self._session = _closed_session(self._location, self._warn)
            self._opened_s = time.monotonic()
        return self._session

    def _run(self, session: QuerySession, sql: str) -> dict[str, Any]:
        timer = threading.Timer(QUERY_S, session.interrupt)
        timer.start()
        try:
            answer = session.answer(sql)
            rows: list[list[Any]] = []
            size, cut = 0, False
            for batch in answer.batches:
                for row in batch:
                    values = [json_value(value) for value in row]
                    size += len(repr(values))
                    if len(rows) >= ROWS_MAX or size > BYTES_MAX:
                        cut = True
                        break
                    rows.append(values)
                if cut:
                    break
        except ConfigurationError as error:
            raise WrongRequest(str(error)) from None
        except duckdb.Error as error:
            raise WrongRequest(str(error).splitlines()[0]) from None
        finally:
            timer.cancel()
        return {"names": answer.names, "kinds": answer.kinds, "rows": rows, "cut": cut}


def _closed_session(location: RunLocation, warn: Callable[[str], None]) -> QuerySession:
    """Returns a session in which all views are defined, and after which DuckDB opens no other file,
    loads nothing and keeps these settings.
    """
    session = QuerySession(location, warn)
    session.define(VIEWS)
    paths = [one.path for topic in ARCHIVED_TOPICS for one in session.archive.held(topic)]
    listed = ", ".join(map(sql_literal, paths))
    for setting in (
        f"SET memory_limit = '{MEMORY}'",
        "SET threads = 2",
        "SET max_temp_directory_size = '0B'",
        f"SET allowed_paths = [{listed}]",
        "SET enable_external_access = false",
        "SET lock_configuration = true",
    ):
        session.connection.execute(setting)
    return session
