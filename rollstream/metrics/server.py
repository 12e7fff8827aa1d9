"""A small HTTP server in its own thread: pages by path, bounded in threads and time.

It never blocks the role that it serves for: more than `REQUESTS_MAX` concurrent requests are
refused, a client that stops reading or writing is dropped, and an error of a page is logged and
answered with status 500.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

log = logging.getLogger(__name__)

REQUESTS_MAX = 8
CLIENT_S = 5.0  # longest read or write of a client
LOOK_S = 0.2  # interval at which the server checks for shutdown


@dataclass(frozen=True, slots=True)
class PageResponse:
    """One HTTP response."""

    status: int
    kind: str
    body: bytes


PageHandler = Callable[[str], PageResponse]
"""Returns the response to a request with this `Accept` header."""


class MetricsServer(ThreadingHTTPServer):
    """Serves until `end`; raises `OSError` if the address is unavailable."""

    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Mapping[str, PageHandler]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._free = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__((host, port), _handler(pages))
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_S,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound port, also if port 0 was requested."""
        return int(self.server_address[1])

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Skips the look-up of the host's full name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a client disconnected", exc_info=True)


def _handler(pages: Mapping[str, PageHandler]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S
        server_version = "rollstream"

        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, with_body: bool) -> None:
            answer = _answer(pages, self.path.partition("?")[0], self.headers.get("Accept", ""))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if with_body:
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return Handler


def _answer(pages: Mapping[str, PageHandler], path: str, accept: str) -> PageResponse:
    page = pages.get(path)
    if page is None:
        known = ", ".join(sorted(pages))
        return PageResponse(404, "text/plain; charset=utf-8", f"served here: {known}\n".encode())
    try:
        return page(accept)
    except Exception:
        log.exception("metrics: %s failed", path)
        return PageResponse(500, "text/plain; charset=utf-8", b"this page failed; see the role's log\n")
