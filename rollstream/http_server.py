"""A bounded HTTP server in threads; a subclass of `HttpResponder` answers.

A connection above `requests_max` takes the place of the one that has waited longest for a request;
if all are being answered, it gets 503. A client that stalls for the responder's `timeout`, or takes
longer for a head, is dropped. The standard library bounds the headers (64 KiB a line, 100 lines).
"""

import logging
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from rollstream.http_guard import HostRule

log = logging.getLogger(__name__)

# Between two checks whether the server is to end.
SHUTDOWN_POLL_S = 0.05
# For a request's head, where the responder sets no `timeout`.
HEAD_S = 30.0
# A connection keeps its place so long after a request, for the next one.
KEPT_S = 5.0
# Wait for a connection that lost its place to end.
PLACE_S = 1.0
# Refusals that are logged: their senders choose their texts.
REFUSALS_MAX = 8
_BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class HttpResponder(BaseHTTPRequestHandler):
    """A subclass defines `do_GET` and the like, and sets `timeout` in seconds. Requests are not
    logged.
    """

    server: "BoundedServer"  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        # Small responses are sent at once.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle_one_request(self) -> None:
        self.server.wait_for_head(self.connection, self.timeout or HEAD_S)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Refuses a Host or Origin that the server's rule refuses."""
        is_parsed = super().parse_request()
        self.server.has_head(self.connection)
        return is_parsed and not self._is_refused()

    def _is_refused(self) -> bool:
        headers = self.headers
        refusal = self.server.rule.refusal(
            headers.get_all("Host", []),
            headers.get_all("Origin", []),
            headers.get("Sec-Fetch-Site", ""),
            headers.get("Sec-Fetch-Mode", ""),
        )
        if refusal:
            self.server.note_refusal(refusal)
            self.close_connection = True
            with suppress(OSError):
                self.content(403, "text/plain; charset=utf-8", f"{refusal}\n".encode())
        return bool(refusal)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        """Sends the head of a response whose body has `length` bytes."""
        self.send_response_only(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def content(self, status: int, kind: str, body: bytes) -> None:
        """Sends a response of content type `kind`, without its body if the request is HEAD."""
        self.head(status, len(body), {"Content-Type": kind, "X-Content-Type-Options": "nosniff"})
        if self.command != "HEAD":
            self.wfile.write(body)


class BoundedServer(ThreadingHTTPServer):
    """Accepts connections, which the standard library calls requests, in a thread until `end`, and
    serves each in another, at most `requests_max` at a time. Raises `OSError` if the address is
    unavailable.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        responder: type[HttpResponder],
        name: str,
        requests_max: int,
        rule: HostRule,
    ) -> None:
        self.rule = rule
        self._waiting: dict[socket.socket, tuple[bool, float, float]] = {}
        """Of each connection without a request: whether it had one before, since when, and until
        when it may wait, both monotonic.
        """
        self._had_request: set[socket.socket] = set()
        self._refusals: set[str] = set()
        self._states = threading.Lock()
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._free = threading.BoundedSemaphore(requests_max)
        super().__init__(address, responder)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(SHUTDOWN_POLL_S,), name=name, daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Is known also if port 0 was requested."""
        return int(self.server_address[1])

    def end(self) -> None:
        """Connections in progress are not awaited."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Binds without the look-up of the host's full name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves in a new thread, or answers 503 if all others are being answered."""
        is_placed = self._free.acquire(blocking=False)
        if not is_placed and self._end_longest_wait():
            is_placed = self._free.acquire(timeout=PLACE_S)
        if is_placed:
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.sendall(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._states:
                self._waiting.pop(request, None)
                self._had_request.discard(request)
            self._free.release()

    def note_refusal(self, refusal: str) -> None:
        """The first for each reason: a scraper shows only the status."""
        with self._states:
            if refusal in self._refusals or len(self._refusals) == REFUSALS_MAX:
                return
            self._refusals.add(refusal)
        log.warning("%s: a request is refused: %s", self._thread.name, refusal)

    def wait_for_head(self, connection: socket.socket, seconds: float) -> None:
        """Lets the connection wait at most for `seconds`."""
        now_s = time.monotonic()
        with self._states:
            has_served = connection in self._had_request
            self._waiting[connection] = has_served, now_s, now_s + seconds

    def has_head(self, connection: socket.socket) -> None:
        with self._states:
            self._waiting.pop(connection, None)
            self._had_request.add(connection)

    def service_actions(self) -> None:
        """Ends the connections whose heads are late; called between two looks at the socket."""
        now_s = time.monotonic()
        with self._states:
            late = [
                connection
                for connection, (_, _, until_s) in self._waiting.items()
                if until_s < now_s
            ]
        for connection in late:
            self._end_wait(connection)

    def _end_longest_wait(self) -> bool:
        """First of those that never had a request. Returns False if none waits, or all may be used
        again.
        """
        idle_s = time.monotonic() - KEPT_S
        with self._states:
            places = {
                connection: wait
                for connection, wait in self._waiting.items()
                if not wait[0] or wait[1] < idle_s
            }
            if not places:
                return False
            longest = min(places, key=lambda connection: places[connection][:2])
        self._end_wait(longest)
        return True

    def _end_wait(self, connection: socket.socket) -> None:
        with self._states:
            if self._waiting.pop(connection, None) is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the error, unless the client or the network caused the error."""
        if isinstance(sys.exception(), ConnectionError):
            return
        log.warning("%s: a request of %s failed", self._thread.name, client_address, exc_info=True)
