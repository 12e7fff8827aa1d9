"""A small HTTP proxy in front of a real server that injects faults: a test lists them, each
matching request takes one, and all other requests pass unchanged.

The server behind it is real, so after a fault a test can look there for the true outcome.
"""

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from testbed.waiting import let_pass

FOREVER = 1 << 30
CODES = {503: "SlowDown", 409: "ConditionalRequestConflict", 403: "AccessDenied"}
PIECES = 20  # of a slowly sent body


def _nothing() -> None:
    pass


@dataclass
class Fault:
    """The fault of the next `count` requests of this method whose target contains `where`.

    Without forwarding: `status` (answer `value`), `reset`, `blackhole` (silent for `value` s, then
    closed). Forwarded first: `status_after`, `reset_after` (the answer is lost), `delay` (answer
    `value` s late), `truncate` (connection closed after the share `value` of the body), `shorten`
    (the same, and the length agrees with it), `drip` (the body over `value` s), `corrupt` (one
    bit). `then` runs after forwarding, before the client gets the answer.
    """

    kind: str
    value: float = 0.0
    method: str = ""
    where: str = ""
    count: int = 1
    then: Callable[[], object] = field(default=_nothing)


class FaultProxy:
    """Listens on a free port of 127.0.0.1 while its `with` block runs."""

    def __init__(self, upstream: str) -> None:
        split = urlsplit(upstream)
        self.upstream = (split.hostname or "", split.port or 80)
        self.requests: list[str] = []
        self.injected = 0
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FaultProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def inject(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += faults

    def clear(self) -> None:
        """Ends all faults, as at the end of an outage."""
        with self._lock:
            self._faults.clear()

    def has_faults(self) -> bool:
        with self._lock:
            return any(fault.count for fault in self._faults)

    def take(self, method: str, target: str) -> Fault | None:
        """The fault of this request."""
        with self._lock:
            self.requests.append(f"{method} {target}")
            for fault in self._faults:
                if fault.count and fault.method in ("", method) and fault.where in target:
                    fault.count -= 1
                    self.injected += 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that give up are the subject of these tests


class _Handler(BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner.take(self.command, self.path)
        if fault is None:
            self._answer(*self._forward(body))
        else:
            self._misbehave(fault, body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(*self.owner.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _misbehave(self, fault: Fault, body: bytes) -> None:
        if fault.kind in ("status", "reset", "blackhole"):
            if fault.kind == "blackhole":
                let_pass(fault.value)
            return self._status(fault) if fault.kind == "status" else self._reset()
        status, headers, content = self._forward(body)
        fault.then()
        if fault.kind == "status_after":
            return self._status(fault)
        if fault.kind == "reset_after":
            return self._reset()
        if fault.kind == "delay":
            let_pass(fault.value)
        kept = content
        if fault.kind in ("truncate", "shorten"):
            kept = content[: int(len(content) * fault.value)]
        if fault.kind == "corrupt" and content:
            kept = bytes([content[0] ^ 1]) + content[1:]
        stated_length = len(kept) if fault.kind == "shorten" else None
        self._answer(
            status, headers, kept, stated_length, fault.value if fault.kind == "drip" else 0.0
        )
        if fault.kind in ("truncate", "shorten"):
            self.close_connection = True
        return None

    def _status(self, fault: Fault) -> None:
        code = CODES.get(int(fault.value), "InternalError")
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self._answer(int(fault.value), [("Content-Type", "application/xml")], text, len(text))

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)  # close sends RST
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        content: bytes,
        stated_length: int | None = None,
        drip_s: float = 0.0,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if stated_length is None or name.lower() != "content-length":
                self.send_header(name, value)
        if stated_length is not None:
            self.send_header("Content-Length", str(stated_length))
        self.end_headers()
        step = max(1, -(-len(content) // PIECES)) if drip_s else max(1, len(content))
        for at in range(0, len(content), step):
            self.wfile.write(content[at : at + step])
            self.wfile.flush()
            let_pass(drip_s / PIECES)
