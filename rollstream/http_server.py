"""A bounded HTTP server for relays and metrics (`BoundedServer`), which serves in threads of its
own beside the work of its process. A subclass of `HttpResponder` answers the requests.

At most `requests_max` connections are served at the same time; others get 503 and are closed. A
client that stops reading or writing for the responder's `timeout` is dropped. Every response states
its length. The standard library bounds the headers (64 KiB a line, 100 lines).
"""

import logging
import socket
import sys
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
    """The base class of request handlers. A subclass defines `do_GET` and the like, and sets
    `timeout` in seconds. Requests are not logged. Small responses are sent at once (TCP_NODELAY).
    """

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        """Send the status and the headers of a response whose body has `length` bytes."""
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
    """Accepts connections in a thread of its own until `end` is called, and serves each in another
    thread, at most `requests_max` at a time. The standard library calls a connection a request. The
    constructor raises `OSError` if the address is unavailable.
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
        """Stop accepting connections and close the socket; those in progress are not awaited."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Bind without the look-up of the host's full name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a new thread, or answer 503 if no place is free."""
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
        """Log the error that ended a connection, unless the client or the network did."""
        if isinstance(sys.exception(), ConnectionError):
            return
        log.warning("%s: a request of %s failed", self._thread.name, client_address, exc_info=True)
