"""The relay's HTTP/1.1 server with range requests (`docs/relay.md` has the table of requests).

Only objects in the relay's cache are served. A path is matched as a whole and never becomes a file
name. A range that is not complete yet is sent as it arrives (`sending.py`). At most
`connections_max` requests are served at the same time; others get 503.
"""

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rollstream.storage.relay.answers import HttpResponder
from rollstream.storage.relay.names import parse_integer, parse_key, parse_wait
from rollstream.storage.relay.names_part import ObjectOffer
from rollstream.storage.relay.pace import BandwidthLimiter
from rollstream.storage.relay.receiving import receive_push
from rollstream.storage.relay.sending import send_object
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import RelayListing

log = logging.getLogger(__name__)

SHUTDOWN_POLL_S = 0.05  # between two checks whether the server is to end
_BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class RelayServer(ThreadingHTTPServer):
    """Serves from its own thread until `end`. Raises `OSError` if it cannot listen on
    the address.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        shelf: RelayCache,
        pace: BandwidthLimiter,
        connections_max: int,
        status: Callable[[], dict[str, Any]],
        token: str = "",
    ) -> None:
        """With a `token`, requests without it get 401."""
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self.shelf, self.pace, self.status = shelf, pace, status
        self._expected = f"Bearer {token}".encode() if token else b""
        self.pushed_s = float("-inf")
        """When the last byte of a push arrived (monotonic)."""
        self._free = threading.BoundedSemaphore(connections_max)
        super().__init__(address, _RequestHandler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(SHUTDOWN_POLL_S,), name="relay-serve"
        )
        self._thread.daemon = True
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        TCPServer.server_bind(
            self
        )  # HTTPServer's own method resolves a host name, which may take seconds
        self.server_name, self.server_port = "relay", self.server_address[1]

    def note_push(self) -> None:
        """Note that bytes of a push arrived."""
        self.pushed_s = time.monotonic()

    def is_allowed(self, authorization: str) -> bool:
        """Whether a request with this header is served; takes the same time for every header."""
        given = authorization.encode("latin-1", "replace")
        return not self._expected or hmac.compare_digest(given, self._expected)

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

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
        log.warning("relay: a request of %s failed", client_address, exc_info=True)


class _RequestHandler(HttpResponder):
    server: RelayServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def parse_request(self) -> bool:
        """Check the token of every request, after its headers were read."""
        if not super().parse_request():
            return False
        if self.server.is_allowed(self.headers.get("Authorization", "")):
            return True
        with self.error_responses():
            self.close(401)
        return False

    def do_GET(self) -> None:
        with self.error_responses():
            split = urlsplit(self.path)
            query = dict(parse_qsl(split.query, max_num_fields=4))
            if split.path == "/status":
                self.json(self.server.status())
            elif split.path == "/objects":
                after, wait_s = parse_integer(query.get("after", "-1")), parse_wait(query)
                self.json(RelayListing(*self._offers(after, wait_s)))
            else:
                send_object(self, self.server.shelf, self.server.pace, split.path, query)

    def do_HEAD(self) -> None:
        with self.error_responses():
            held = self.server.shelf.find(parse_key(self.path))
            if held is None:
                return self.empty(404)
            received = held.offer.bytes if held.verified else held.written
            return self.head(200, held.offer.bytes, {"X-Received": str(received)})

    def handle_expect_100(self) -> bool:
        """Do not respond here: `receive_push` responds once it is known whether the body is wanted."""
        return True

    def do_PUT(self) -> None:
        with self.error_responses():
            receive_push(self, self.server.shelf, parse_key(self.path), self.server.note_push)

    def _offers(self, after: int, wait_s: float) -> tuple[int, tuple[ObjectOffer, ...]]:
        count, offers = self.server.shelf.offers(after, wait_s)
        return count, tuple(offers)
