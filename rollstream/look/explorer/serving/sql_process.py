"""Runs the SQL of the explorer's page: `python -m rollstream.look.explorer.serving.sql_process`,
which `sql.py` starts, bounds and ends. It reads JSON lines, first a `SqlSetup`, then `SqlRequest`s,
and answers by lines on stdout. A query reads the archived files of its run and no other file, loads
nothing and changes no setting.
"""

import os
import resource
import sys
import time
from dataclasses import fields
from typing import Any, BinaryIO

import duckdb
import msgspec

from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.look.query.archive_files import sql_literal
from rollstream.look.query.confinement import close_settings
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.output import json_value
from rollstream.look.query.session import QuerySession
from rollstream.look.query.views import VIEWS
from rollstream.run.supervisor.process import end_with_parent
from rollstream.streams.topics import ARCHIVED_TOPICS

ROWS_MAX, BYTES_MAX = 1000, 2 << 20
# DuckDB keeps it with most operators, and ends those in good order.
DUCKDB_LIMIT = "192 MB"
# A session sees the log as of its opening, so it is opened again after this time.
RENEW_S = 30.0
# Address space of a thread; DuckDB starts one for each core.
STACK_BYTES = 8 << 20


class SqlSetup(msgspec.Struct):
    locations: dict[str, RunLocation]
    memory_bytes: int


class SqlRequest(msgspec.Struct):
    """Asks for the rows of a query about a run, or, without a query, for the views."""

    run: str
    sql: str = ""


class SqlReply(msgspec.Struct, omit_defaults=True):
    """The state is `opened` first, once the run is open and the query begins, then one of the
    others: `refused` for a wrong query, `memory` for one that needed more than its limit, which
    `message` names if it is DuckDB's own, `unreadable` for a run that cannot be read. `notes` are
    messages about the run for the user.
    """

    state: str
    message: str = ""
    answer: dict[str, Any] = {}
    notes: list[str] = []


def encode_setup(setup: SqlSetup) -> bytes:
    # Subclasses of `RunLocation` become plain ones.
    plain = {
        number: RunLocation(**{f.name: getattr(location, f.name) for f in fields(RunLocation)})
        for number, location in setup.locations.items()
    }
    line = SqlSetup(plain, setup.memory_bytes)
    return msgspec.json.encode(line, enc_hook=str) + b"\n"


def decode_setup(line: bytes) -> SqlSetup:
    return msgspec.json.decode(line, type=SqlSetup, dec_hook=lambda kind, text: kind(text))


def bound_memory(limit_bytes: int) -> None:
    """Let every allocation beyond `limit_bytes` of this process fail, for good."""
    # A core file would hold the run's secrets.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The bound is on writable memory, not on address space: allocators reserve far more of that
    # than they use. Stacks of threads count as a whole, so they are added.
    allowed = limit_bytes + (os.cpu_count() or 1) * STACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


class SqlServer:
    """Answers requests with one session, that of the run that was queried last."""

    def __init__(self, setup: SqlSetup, replies: BinaryIO) -> None:
        self._locations, self._replies = setup.locations, replies
        self._notes: list[str] = []
        self._session: QuerySession | None = None
        self._run, self._opened_s = "", 0.0

    def serve(self, requests: BinaryIO) -> None:
        for line in requests:
            request = msgspec.json.decode(line, type=SqlRequest)
            try:
                reply = self._reply(request)
            except (RollstreamError, duckdb.Error, MemoryError) as error:
                reply = refusal(error)
            self._send(reply)
            # DuckDB promises nothing of its state after a failed allocation: the next query gets a
            # new process, which opens the run again.
            if reply.state in ("memory", "unreadable"):
                return

    def _reply(self, request: SqlRequest) -> SqlReply:
        session = self._current(request.run)
        self._send(SqlReply("opened"))
        answer = _rows(session, request.sql) if request.sql else {"views": _views(session)}
        return SqlReply("answer", "", answer, self._notes)

    def _send(self, reply: SqlReply) -> None:
        self._replies.write(msgspec.json.encode(reply) + b"\n")
        self._replies.flush()
        if reply.notes:
            self._notes = []

    def _current(self, run: str) -> QuerySession:
        is_old = time.monotonic() - self._opened_s > RENEW_S
        if self._session is None or run != self._run or is_old:
            if self._session is not None:
                self._session.close()
                self._session = None
            self._session = closed_session(self._locations[run], self._notes)
            self._run, self._opened_s = run, time.monotonic()
        return self._session


def refusal(error: Exception) -> SqlReply:
    """Returns the reply to a request that raised this error."""
    # A failed allocation is DuckDB's error or an internal one of it, and then the context of the
    # error that explains it: of a wrong query, or of an archived file that could not be read for
    # want of memory.
    origin: BaseException | None = error
    while origin is not None:
        text = str(origin)
        if isinstance(origin, duckdb.OutOfMemoryException) and "used)" in text:
            return SqlReply("memory", DUCKDB_LIMIT)
        is_denied = isinstance(origin, MemoryError | duckdb.OutOfMemoryException)
        if is_denied or "bad_alloc" in text:
            return SqlReply("memory")
        origin = origin.__context__
    if isinstance(error, RollstreamError) and not isinstance(error, ConfigurationError):
        return SqlReply("unreadable", str(error))
    return SqlReply("refused", str(error).strip().split("\n\nStack Trace")[0])


def _rows(session: QuerySession, sql: str) -> dict[str, Any]:
    answer = session.answer(sql)
    rows: list[list[Any]] = []
    size = 0
    for batch in answer.batches:
        for row in batch:
            values = [json_value(value, is_exact=True) for value in row]
            size += len(msgspec.json.encode(values))
            if len(rows) >= ROWS_MAX or size > BYTES_MAX:
                return {"names": answer.names, "kinds": answer.kinds, "rows": rows, "cut": True}
            rows.append(values)
    return {"names": answer.names, "kinds": answer.kinds, "rows": rows, "cut": False}


def _views(session: QuerySession) -> list[dict[str, Any]]:
    return [
        {"name": view.name, "sentence": view.sentence, "columns": session.columns(view.name)}
        for view in VIEWS.values()
    ]


def closed_session(location: RunLocation, notes: list[str]) -> QuerySession:
    """Returns a session with all views defined, in which DuckDB opens no other file, loads nothing
    and keeps these settings.
    """
    session = QuerySession(location, notes.append)
    session.connection.execute("SET threads = 2")
    session.define(VIEWS)
    paths = [file.path for topic in ARCHIVED_TOPICS for file in session.archive.held(topic)]
    listed = ", ".join(map(sql_literal, paths))
    for setting in (
        f"SET memory_limit = '{DUCKDB_LIMIT}'",
        "SET max_temp_directory_size = '0B'",
    ):
        session.connection.execute(setting)
    close_settings(session.connection, f"SET allowed_paths = [{listed}]")
    return session


def main() -> None:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    # Prints of a library are no reply.
    os.dup2(2, 1)
    setup = decode_setup(sys.stdin.buffer.readline())
    # Before anything of the run is read.
    bound_memory(setup.memory_bytes)
    SqlServer(setup, replies).serve(sys.stdin.buffer)


if __name__ == "__main__":
    main()
