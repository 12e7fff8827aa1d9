"""A bounded HTTP server for relays and metrics: it never blocks its process.

At most `requests_max` requests are served at the same time; others get 503. A client that stops
reading or writing for the responder's `timeout` is dropped. Every response has a length. Headers
are bounded by the standard library (64 KiB a line, 100 lines).
"""

import logging
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

log = logging.getLogger(__name__)

SHUTDOWN_POLL_S = 0.05  # between two checks whether the server is to end
_BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class HttpResponder(BaseHTTPRequestHandler):
    """The base class of request handlers; it logs no requests and sends small responses at once."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def content(self, status: int, kind: str, body: bytes) -> None:
        """Send a whole response of content type `kind`, without its body if the request is HEAD."""
        self.head(status, len(body), {"Content-Type": kind})
        if self.command != "HEAD":
            self.wfile.write(body)


class BoundedServer(ThreadingHTTPServer):
    """Serves requests from its own thread until `end` is called, at most `requests_max` at a time.
    The constructor raises `OSError` if the address is unavailable.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], responder: type[HttpResponder], name: str, requests_max: int
    ) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._free = threading.BoundedSemaphore(requests_max)
        super().__init__(address, responder)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(SHUTDOWN_POLL_S,), name=name, daemon=True
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
        """Bind without the look-up of the host's full name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.sendall(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("%s: a request of %s failed", self._thread.name, client_address, exc_info=True)
