"""What a relay answers, over HTTP/1.1 with ranges (`docs/relay.md` has the table).

Only objects that the shelf holds are served: a path is matched whole and never becomes a file's
name. A range that is not there yet is sent as it arrives; a silence is ended after `STALL_S`. At
most `connections_max` requests are answered at once, others are refused with 503.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from storage.relay.asked import integer, key_of, range_of, rest_of, seconds
from storage.relay.held import HeldObject, ObjectBusy, ObjectDropped
from storage.relay.names import Offer
from storage.relay.pace import PIECE_BYTES, Pace
from storage.relay.shelf import Shelf
from storage.relay.wire import Listing
from streams.errors import CorruptObject, StoreError

log = logging.getLogger(__name__)

CLIENT_S = 30.0  # for one read or write of a client
STALL_S = 60.0  # without a new byte, a reader is sent away
LINGER_BYTES = 1 << 20  # at once
LOOK_S = 0.05  # within which the server notices that it is to end
SILENCE_S = 1.0  # after which a reader that waits for bytes is looked after
LINGER_S = 2.0  # for a client to read an answer that came before its body was taken
_BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class RelayServer(ThreadingHTTPServer):
    """Serves from a thread of its own until `end`; `OSError` when the address cannot be had."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        shelf: Shelf,
        pace: Pace,
        connections_max: int,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self.shelf, self.pace, self.status = shelf, pace, status
        self.pushed_s = float("-inf")
        """When the last byte of a push came (monotonic)."""
        self._free = threading.BoundedSemaphore(connections_max)
        super().__init__(address, _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_S,), name="relay-serve"
        )
        self._thread.daemon = True
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks up a name, which may take seconds
        self.server_name, self.server_port = "relay", self.server_address[1]

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


class _Handler(BaseHTTPRequestHandler):
    server: RelayServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = CLIENT_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        with self._told():
            split = urlsplit(self.path)
            query = dict(parse_qsl(split.query, max_num_fields=4))
            if split.path == "/status":
                self._json(self.server.status())
            elif split.path == "/objects":
                after, wait_s = integer(query.get("after", "-1")), seconds(query)
                self._json(Listing(*self._offers(after, wait_s)))
            else:
                self._object(split.path, query)

    def do_HEAD(self) -> None:
        with self._told():
            held = self.server.shelf.find(key_of(self.path))
            if held is None:
                return self._empty(404)
            received = held.offer.bytes if held.verified else held.at
            return self._head(200, held.offer.bytes, {"X-Received": str(received)})

    def handle_expect_100(self) -> bool:
        """Told in `_receive`, once it is known whether the body is wanted."""
        return True

    def do_PUT(self) -> None:
        with self._told():
            self._receive(key_of(self.path))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _told(self) -> "_Told":
        return _Told(self)

    def _offers(self, after: int, wait_s: float) -> tuple[int, tuple[Offer, ...]]:
        count, offers = self.server.shelf.offers(after, wait_s)
        return count, tuple(offers)

    # ---- objects ---------------------------------------------------------------------------------

    def _object(self, path: str, query: dict[str, str]) -> None:
        """A neighbour (`receiving=1`) gets bytes as they come, others what was verified."""
        key, shelf = key_of(path), self.server.shelf
        if query.get("receiving") == "1":
            held = shelf.find(key)
        else:
            held = shelf.wait_offered(key, seconds(query))
        if held is None:
            coming = {"X-Coming": str(shelf.came())} if shelf.is_coming(key) else {}
            return self._empty(404, coming)
        start, end = range_of(self.headers.get("Range"), held.offer.bytes)
        turn = held.turn
        if start is None:
            self._head(200, held.offer.bytes, {})
        elif start >= end:
            size = held.offer.bytes
            return self._empty(416, {"Content-Range": f"bytes */{size}"})
        else:
            said = f"bytes {start}-{end - 1}/{held.offer.bytes}"
            self._head(206, end - start, {"Content-Range": said})
        try:
            self._send(held, start or 0, end, turn)
        except (ObjectDropped, OSError):  # the length told the client what it did not get
            self.close_connection = True
        return None

    def _send(self, held: HeldObject, at: int, end: int, turn: int) -> None:
        moved_s, began = time.monotonic(), at
        while at < end:
            received = held.wait(at, turn, SILENCE_S)
            if received > at:
                count = min(PIECE_BYTES, min(received, end) - at)
                self.server.pace.take(count)
                at += self._sendfile(held.descriptor, at, count)
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > STALL_S or self._is_gone():
                raise ObjectDropped(f"object {held.key}: nobody reads, or nothing comes")
        self.server.shelf.add("relay_sent_bytes_total", at - began)

    def _sendfile(self, descriptor: int, at: int, count: int) -> int:
        """Straight from the shared memory to the socket."""
        to = self.connection.fileno()
        while True:
            try:
                return os.sendfile(to, descriptor, at, count)
            except BlockingIOError:
                if not select.select([], [to], [], CLIENT_S)[1]:
                    raise TimeoutError("the client does not read") from None

    def _is_gone(self) -> bool:
        """Whether the client closed while we wait for bytes."""
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        with suppress(BlockingIOError):
            return not self.connection.recv(1, socket.MSG_PEEK)
        return False

    # ---- pushes ----------------------------------------------------------------------------------

    def _receive(self, key: str) -> None:
        """An object from `Content-Range` on; 409 when that is not where it ends here."""
        start, size = rest_of(self.headers.get("Content-Range"), self.headers.get("Content-Length"))
        offer = Offer(key, size, self.headers.get("X-Content-Hash", ""))
        if not offer.is_sound:
            raise ValueError("a push needs X-Content-Hash, 32 hex digits")
        held = self.server.shelf.accept(offer)
        if held is None:
            return self._close(409)
        try:
            with held.writing():
                if held.at != start or (held.verified and size):
                    raise ObjectBusy(f"object {key}: it is here up to byte {held.at}")
                if self.headers.get("Expect", "").lower() == "100-continue":
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._write(held)
        except (ObjectBusy, ObjectDropped):
            return self._close(409)
        except CorruptObject as error:
            log.error("%s", error)
            self.server.shelf.add("relay_wrong_total", 1)
            return self._close(422)
        self.server.shelf.completed(held)
        return self._empty(201)

    def _write(self, held: HeldObject) -> None:
        while not held.verified:
            count = self.rfile.readinto1(held.room())  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise ConnectionError("the push ended in the middle")
            self.server.pushed_s = time.monotonic()
            held.wrote(count)
            self.server.shelf.add("relay_pushed_bytes_total", count)

    # ---- answers ---------------------------------------------------------------------------------

    def _json(self, value: Any) -> None:
        body = msgspec.json.encode(value)
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _empty(self, status: int, headers: dict[str, str] | None = None) -> None:
        self._head(status, 0, headers or {})

    def _close(self, status: int, headers: dict[str, str] | None = None) -> None:
        """Answer and end the connection: there may be a body that nobody wants.

        A client that is still sending it would be reset and never read the answer: what comes
        within `LINGER_S` is taken and forgotten.
        """
        self.close_connection = True
        self._empty(status, {"Connection": "close", **(headers or {})})
        self.connection.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + LINGER_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            if not self.connection.recv(LINGER_BYTES):
                return

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self, message: str) -> None:
        """400: this request is none that a relay knows."""
        log.warning("relay: refused %r of %s: %s", self.path[:80], self.client_address[0], message)
        self._close(400)

    def fail(self, error: OSError) -> None:
        """The connection broke, or there is no room: the client learns it from the close."""
        if isinstance(error, StoreError):
            log.warning("relay: %s", error)
        self.close_connection = True


class _Told:
    """Turns what a request may end in into its answer."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> bool:
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            self._handler.refuse(str(error))
            return True
        if isinstance(error, OSError):
            self._handler.fail(error)
            return True
        return False
