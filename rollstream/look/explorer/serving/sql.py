"""Answers free SQL about the explored runs, only where `--sql` allows it, one query at a time in a
process of its own (`sql_process.py`).

The bounds lie outside of that process: the kernel refuses memory beyond `MEMORY`, and this process
ends the other one after `QUERY_S`, `REPLY_BYTES`, or resident memory above `MEMORY` where the
kernel does not count it.
"""

import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollstream.deadline import Deadline
from rollstream.errors import StoreError
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.query.locate import RunLocation

log = logging.getLogger(__name__)

QUERY_S = 10.0
# To import the libraries and to open the run.
OPEN_S = 120.0
MEMORY, LIMIT = 1 << 30, "1 GB"
REPLY_BYTES = 16 << 20
# Between two looks at the process's memory.
LOOK_S = 0.05
_ADVICE = "select fewer rows or columns, aggregate earlier, or use rollstream query"
# Python, C++ and the C library write these when they end a process that gets no memory.
_NO_MEMORY = ("MemoryError", "bad_alloc", "cannot allocate memory")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class FreeSql:
    """Answers queries about the runs in `locations`, by their numbers, for any thread. `notes`
    receives messages for the user about a run. Close it to end the process.
    """

    def __init__(
        self, locations: Mapping[str, RunLocation], notes: Callable[[str, str], None]
    ) -> None:
        self._locations, self._notes = locations, notes
        self._lock = threading.Lock()
        self._process: SqlProcess | None = None

    def answer(self, run: str, sql: str) -> dict[str, Any]:
        """Returns the first rows of a query. Raises `WrongRequest` if it is wrong, takes too long
        or needs too much memory.
        """
        if not self._lock.acquire(timeout=QUERY_S):
            raise WrongRequest("another query is running; try again")
        try:
            return self._ask(run, sql)
        finally:
            self._lock.release()

    def views(self) -> list[dict[str, Any]]:
        with self._lock:
            return self._ask(next(iter(self._locations)), "")["views"]

    def close(self) -> None:
        """End the process, also within a query."""
        # The kill comes before the lock, which a running query holds.
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._process.end()
            self._process = None

    def _ask(self, run: str, sql: str) -> dict[str, Any]:
        if self._process is None:
            self._process = SqlProcess(self._locations)
        process, is_answered = self._process, False
        try:
            reply = process.ask(run, sql)
            is_answered = reply["state"] in ("answer", "refused")
        finally:
            # After an error its state is unknown: the next query gets a new process.
            if not is_answered:
                self._process = None
                process.end()
        for note in reply.get("notes", ()):
            self._notes(run, note)
        match reply["state"]:
            case "answer":
                return {**reply["answer"], "seconds": round(process.seconds, 4)}
            case "memory":
                raise too_much_memory(reply.get("message", LIMIT))
            case "unreadable":
                raise StoreError(reply["message"])
            case _:
                raise WrongRequest(reply["message"])


def too_much_memory(limit: str) -> WrongRequest:
    return WrongRequest(f"the query needed more than {limit}: {_ADVICE}")


class SqlProcess:
    """Runs `sql_process.py` for these runs until `end`. One thread uses it; any may call `kill`."""

    def __init__(self, locations: Mapping[str, RunLocation]) -> None:
        from rollstream.look.explorer.serving.sql_process import SqlSetup, encode_setup

        self.seconds = 0.0
        """How long the last query took."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        command = [sys.executable, "-P", "-m", "rollstream.look.explorer.serving.sql_process"]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0,
            env={**os.environ, "ROLLSTREAM_PARENT": str(os.getpid()), "MALLOC_ARENA_MAX": "2"},
        )  # fmt: skip
        self._data = b""
        self._send(encode_setup(SqlSetup(dict(locations), MEMORY)))

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, run: str, sql: str) -> dict[str, Any]:
        """Returns the reply to a query; afterwards the process may have ended. Raises
        `WrongRequest` if the query exceeds a bound, `StoreError` if the process fails.
        """
        self._send(msgspec.json.encode({"run": run, "sql": sql}) + b"\n")
        reply = self._reply(OPEN_S, "the run was not opened")
        started = time.monotonic()
        if reply["state"] == "opened":
            reply = self._reply(QUERY_S, "the query was ended")
        self.seconds = time.monotonic() - started
        return reply

    def kill(self) -> None:
        self._child.kill()

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()

    def _send(self, line: bytes) -> None:
        assert self._child.stdin is not None
        # The reply gives the reason.
        with suppress(BrokenPipeError):
            view = memoryview(line)
            while view:
                view = view[self._child.stdin.write(view) :]

    def _reply(self, seconds: float, late: str) -> dict[str, Any]:
        assert self._child.stdout is not None
        deadline = Deadline(seconds)
        while b"\n" not in self._data:
            if deadline.passed():
                raise WrongRequest(f"{late} after {seconds:g} s: {_ADVICE}")
            if self._resident_bytes() > MEMORY or len(self._data) > REPLY_BYTES:
                raise too_much_memory(LIMIT)
            if select.select([self._child.stdout], [], [], min(LOOK_S, deadline.remaining_s()))[0]:
                part = os.read(self._child.stdout.fileno(), 1 << 20)
                if not part:
                    raise self._failure()
                self._data += part
        line, _, self._data = self._data.partition(b"\n")
        return msgspec.json.decode(line)

    def _resident_bytes(self) -> int:
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError, ValueError):
            # The system does not state it.
            return 0

    def _failure(self) -> WrongRequest | StoreError:
        code = self._child.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        text = self._errors.read().decode(errors="replace")
        log.debug("the SQL process ended with %d: %s", code, text)
        # An allocation that fails inside of a library ends the process by a signal or by an
        # exception of C++.
        if code < 0 or any(sign in text for sign in _NO_MEMORY):
            return too_much_memory(LIMIT)
        return StoreError(f"the SQL process ended with {code}: {text.strip()[-300:]}")
