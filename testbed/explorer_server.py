"""Serves runs by the explorer's own server in a thread of this process (`serving`), and reads
answers by raw HTTP (`ask`), so that a test decides every byte of a request.
"""

import json
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollstream.look.explorer.serving.address import bind
from rollstream.look.explorer.serving.events import EventHub
from rollstream.look.explorer.serving.routes import Explorer
from rollstream.look.explorer.serving.security import access_rule
from rollstream.look.explorer.serving.server import ExplorerServer
from rollstream.look.query.locate import locate_run
from testbed.waiting import wait_for

READ_S = 60.0


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Holds a response: status, headers with lower-case names, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """A running server: its port and its explorer."""

    port: int
    explorer: Explorer

    def get(self, path: str, *headers: str, method: str = "GET") -> HttpAnswer:
        """Requests a path with the right Host and these further header lines."""
        return self.raw(f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *headers)

    def json(self, path: str) -> Any:
        """Returns the JSON of a route below `/api/`; fails for an error."""
        found = self.get(f"/api/{path}")
        assert found.status == 200, found
        return found.json()

    def raw(self, *lines: str) -> HttpAnswer:
        """Sends these lines as a request's head, and returns the response."""
        with self.connected(*lines) as connection:
            data = b""
            while part := connection.recv(65536):
                data += part
        return parse_answer(data)

    @contextmanager
    def connected(self, *lines: str) -> Generator[socket.socket]:
        """Sends these lines as a request's head, and leaves the response to the caller."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=READ_S) as connection:
            head = "\r\n".join([*lines, "Connection: close", "", ""])
            connection.sendall(head.encode("latin-1"))
            yield connection


def parse_answer(data: bytes) -> HttpAnswer:
    """Returns a response from its bytes; a chunked body is joined."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if headers.get("transfer-encoding") == "chunked":
        parts: list[bytes] = []
        while body:
            size, _, rest = body.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            body = rest[int(size, 16) + 2 :]
        body = b"".join(parts)
    return HttpAnswer(int(first.split()[1]), headers, body)


@contextmanager
def serving(
    named: Sequence[str],
    token: str = "",
    with_sql: bool = False,
    allowed: tuple[str, ...] = (),
    wait: bool = True,
) -> Generator[ServedRuns]:
    """Serves the runs until the block ends; with `wait` their indexes are complete before."""
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    rule = access_rule("127.0.0.1", port, allowed, token)
    hub = EventHub()
    with Explorer([locate_run(name) for name in named], hub.publish, with_sql) as explorer:
        started = threading.Event()
        server = ExplorerServer(explorer, hub, rule, started.set)
        thread = threading.Thread(target=server.run, args=(bound,), daemon=True)
        thread.start()
        assert started.wait(READ_S)
        if wait:
            runs = explorer.runs
            wait_for(lambda: all(run.index.progress.complete for run in runs))
        try:
            yield ServedRuns(port, explorer)
        finally:
            server.end()
            thread.join(READ_S)
