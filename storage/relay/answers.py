"""How a relay answers over HTTP/1.1, whatever was asked: every answer has a length, and what a
request may end in becomes one.

A client that is refused while it still sends its body reads why, within `LINGER_S`.
"""

import logging
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from streams.errors import StoreError

log = logging.getLogger(__name__)

CLIENT_S = 30.0  # for one read or write of a client
LINGER_BYTES = 1 << 20  # at once
LINGER_S = 2.0  # for a client to read an answer that came before its body was taken


class Answers(BaseHTTPRequestHandler):
    """Base of the handler that knows what to answer."""

    protocol_version = "HTTP/1.1"
    timeout = CLIENT_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @contextmanager
    def told(self) -> Generator[None]:
        """The client learns what the block ends in."""
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
        """Answer and end the connection: there may be a body that nobody wants.

        A client that is still sending it would be reset and never read the answer: what comes
        within `LINGER_S` is taken and forgotten.
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
        """400: this request is none that a relay knows."""
        log.warning("relay: refused %r of %s: %s", self.path[:80], self.client_address[0], message)
        self.close(400)

    def _fail(self, error: OSError) -> None:
        """The connection broke, or there is no room: the client learns it from the close."""
        if isinstance(error, StoreError):
            log.warning("relay: %s", error)
        self.close_connection = True
