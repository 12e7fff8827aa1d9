"""HTTP/1.1 responses of a relay: every response has a length, and every error of a request becomes
a response or a closed connection.

A client that is refused while it still sends its body can read the reason within `LINGER_S`.
"""

import logging
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from rollstream.errors import StoreError

log = logging.getLogger(__name__)

CLIENT_S = 30.0  # per read from or write to a client
LINGER_BYTES = 1 << 20  # per read
LINGER_S = 2.0  # for a client to read a response that was sent before its body was read


class HttpResponder(BaseHTTPRequestHandler):
    """Base class of the relay's request handler."""

    protocol_version = "HTTP/1.1"
    timeout = CLIENT_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @contextmanager
    def error_responses(self) -> Generator[None]:
        """Turn an error of the block into a response: `ValueError` into 400, `OSError` into a
        closed connection.
        """
        try:
            yield
        except OSError as error:
            self._fail(error)
        except ValueError as error:
            self._refuse(str(error))

    def json(self, value: Any) -> None:
        body = msgspec.json.encode(value)
        self.head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def empty(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.head(status, 0, headers or {})

    def close(self, status: int) -> None:
        """Respond and end the connection; an unread body is discarded.

        A client that is still sending its body would get a reset and never read the response. The
        bytes that arrive within `LINGER_S` are therefore read and discarded.
        """
        self.close_connection = True
        self.empty(status, {"Connection": "close"})
        self.connection.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + LINGER_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            if not self.connection.recv(LINGER_BYTES):
                return

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, message: str) -> None:
        """Respond 400: the request is not valid."""
        log.warning("relay: refused %r of %s: %s", self.path[:80], self.client_address[0], message)
        self.close(400)

    def _fail(self, error: OSError) -> None:
        """The connection broke, or there is no room: the client sees the closed connection."""
        if isinstance(error, StoreError):
            log.warning("relay: %s", error)
        self.close_connection = True
