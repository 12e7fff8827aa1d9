"""Serves a relay's cache over HTTP/1.1 with range requests (`docs/explanation/relay.md` has the
table of requests).

Only objects in the relay's cache are served. A path is matched as a whole and never becomes a file
name. Every error of a request becomes a response or a closed connection.
"""

import hmac
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from rollstream.errors import CorruptObject, StoreError
from rollstream.http_server import BoundedServer, HttpResponder
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import PIECE_BYTES, BandwidthLimiter, RelayListing
from rollstream.storage.relay.object import (
    CachedObject,
    ObjectBusy,
    ObjectDropped,
    ObjectOffer,
    parse_integer,
    parse_key,
    parse_push_range,
    parse_range,
    parse_wait,
    version_of,
)
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

CLIENT_S = 30.0  # a single read from or write to a client takes at most this
LINGER_BYTES = 1 << 20  # per read
LINGER_S = 2.0  # a client has this long to read a response that was sent before its body was read
STALL_S = 60.0  # a transfer without a new byte ends after this
SILENCE_S = 1.0  # between two checks whether a waiting client is still there
PUSHED_MAX = 64  # versions kept: before the first announcement a client can name any


class RelayResponder(HttpResponder):
    """Answers the requests of one connection, and turns their errors into responses."""

    protocol_version = "HTTP/1.1"
    timeout = CLIENT_S
    server: "RelayServer"  # pyright: ignore[reportIncompatibleVariableOverride]

    @contextmanager
    def error_responses(self) -> Generator[None]:
        """Turn an error of the block into a response: `ValueError` into 400, `OSError` into a
        closed connection.
        """
        try:
            yield
        except OSError as error:  # the connection broke, or there is no room
            if isinstance(error, StoreError):
                log.warning("relay: %s", error)
            self.close_connection = True
        except ValueError as error:
            where = self.path[:80], self.client_address[0]
            log.warning("relay: refused %r of %s: %s", *where, error)
            self.close(400)

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
                self._json(self.server.status())
            elif split.path == "/objects":
                after, wait_s = parse_integer(query.get("after", "-1")), parse_wait(query)
                count, offers = self.server.cache.offers(after, wait_s)
                self._json(RelayListing(count, tuple(offers)))
            else:
                send_object(self, self.server.cache, self.server.pace, split.path, query)

    def do_HEAD(self) -> None:
        with self.error_responses():
            held = self.server.cache.find(parse_key(self.path))
            if held is None:
                return self.empty(404)
            received = held.offer.bytes if held.verified else held.written
            return self.head(200, held.offer.bytes, {"X-Received": str(received)})

    def handle_expect_100(self) -> bool:
        """Do not respond here: `receive_push` responds once it is known whether the body is
        wanted.
        """
        return True

    def do_PUT(self) -> None:
        with self.error_responses():
            key = parse_key(self.path)
            receive_push(self, self.server.cache, key, partial(self.server.note_push, key))

    def _json(self, value: Any) -> None:
        self.content(200, "application/json", msgspec.json.encode(value))


def receive_push(
    sender: RelayResponder, cache: RelayCache, key: str, on_bytes: Callable[[], None]
) -> None:
    """Receive an object straight into shared memory, from the start of `Content-Range` on; respond
    409 if the object is unwanted or the bytes that are here do not end at that start, and 422 if
    the object does not match `X-Content-Hash`: then it is not kept. `on_bytes` is called whenever
    bytes arrive.
    """
    headers = sender.headers
    start, size = parse_push_range(headers.get("Content-Range"), headers.get("Content-Length"))
    offer = ObjectOffer(key, size, headers.get("X-Content-Hash", ""))
    if not offer.is_sound:
        raise ValueError("a push needs X-Content-Hash, 32 hex digits")
    held = cache.accept(offer) if cache.wants_push(offer) else None
    if held is None:
        return sender.close(409)
    try:
        with held.writing():
            if held.written != start or (held.verified and size):
                raise ObjectBusy(f"object {key}: it is here up to byte {held.written}")
            if headers.get("Expect", "").lower() == "100-continue":
                sender.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            _write(sender, cache, held, on_bytes)
    except (ObjectBusy, ObjectDropped):
        return sender.close(409)
    except CorruptObject as error:
        log.error("%s", error)
        cache.add("relay_wrong_total", 1)
        return sender.close(422)
    cache.completed(held)
    return sender.empty(201)


def _write(
    sender: RelayResponder, cache: RelayCache, held: CachedObject, on_bytes: Callable[[], None]
) -> None:
    while not held.verified:
        count = sender.rfile.readinto1(held.room())  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise ConnectionError("the push ended in the middle")
        on_bytes()
        held.advance(count)
        cache.add("relay_pushed_bytes_total", count)


def send_object(
    to: RelayResponder,
    cache: RelayCache,
    pace: BandwidthLimiter,
    path: str,
    query: Mapping[str, str],
) -> None:
    """Send the object or a range of it, straight from shared memory as its bytes arrive, at the
    rate of `pace`; respond 404 if it is not here, 416 if the range is outside it. A neighbour
    (`receiving=1`) gets bytes that are not verified yet; all other clients get offered objects
    only. A transfer without new bytes ends after `STALL_S`, or when its client closes.
    """
    key = parse_key(path)
    if query.get("receiving") == "1":
        held = cache.find(key)
    else:
        held = cache.wait_offered(key, parse_wait(query))
    if held is None:
        coming = {"X-Coming": str(cache.bytes_received())} if cache.is_expected(key) else {}
        return to.empty(404, coming)
    start, end = parse_range(to.headers.get("Range"), held.offer.bytes)
    restarts = held.restarts
    if start is None:
        to.head(200, held.offer.bytes, {})
    elif start >= end:
        return to.empty(416, {"Content-Range": f"bytes */{held.offer.bytes}"})
    else:
        content_range = f"bytes {start}-{end - 1}/{held.offer.bytes}"
        to.head(206, end - start, {"Content-Range": content_range})
    began = start or 0
    try:
        _send(to.connection, pace, held, began, end, restarts)
    except (ObjectDropped, OSError):  # the client knows from the length that bytes are missing
        to.close_connection = True
    else:
        cache.add("relay_sent_bytes_total", end - began)
    return None


def _send(
    to: socket.socket, pace: BandwidthLimiter, held: CachedObject, at: int, end: int, restarts: int
) -> None:
    moved_s = time.monotonic()
    while at < end:
        received = held.wait(at, restarts, SILENCE_S)
        if received > at:
            count = min(PIECE_BYTES, min(received, end) - at)
            pace.take(count)
            at += _sendfile(to.fileno(), held.descriptor, at, count)
            moved_s = time.monotonic()
        elif time.monotonic() - moved_s > STALL_S or _is_gone(to):
            raise ObjectDropped(f"object {held.key}: the client left, or no bytes arrive")


def _sendfile(to: int, descriptor: int, at: int, count: int) -> int:
    """Copy from the shared memory to the socket inside the kernel."""
    while True:
        try:
            return os.sendfile(to, descriptor, at, count)
        except BlockingIOError:
            if not select.select([], [to], [], CLIENT_S)[1]:
                raise TimeoutError("the client does not read") from None


def _is_gone(client: socket.socket) -> bool:
    """Returns whether the client closed the connection while the relay waits for bytes."""
    if not select.select([client], [], [], 0)[0]:
        return False
    with suppress(BlockingIOError):
        return not client.recv(1, socket.MSG_PEEK)
    return False


class RelayServer(BoundedServer):
    """Serves the objects of `cache`, and keeps the times at which pushes brought bytes."""

    def __init__(
        self,
        address: tuple[str, int],
        cache: RelayCache,
        pace: BandwidthLimiter,
        connections_max: int,
        status: Callable[[], dict[str, Any]],
        token: str = "",
    ) -> None:
        """`pace` limits the send rate; `status` returns the response to `GET /status`. With a
        `token`, requests without it get 401.
        """
        self.cache, self.pace, self.status = cache, pace, status
        self._expected = f"Bearer {token}".encode() if token else b""
        self._pushed_s: dict[Version, float] = {}
        self._pushes = threading.Lock()
        super().__init__(address, RelayResponder, "relay-serve", connections_max)

    def note_push(self, key: str) -> None:
        """Note that bytes of a push of this object arrived."""
        version = version_of(key)
        with self._pushes:
            if version is not None:
                self._pushed_s[version] = time.monotonic()
            while len(self._pushed_s) > PUSHED_MAX:
                del self._pushed_s[min(self._pushed_s, key=lambda v: self._pushed_s[v])]

    def pushed_s(self, version: Version) -> float:
        """Returns the monotonic time at which a push of this version or an older one last brought
        bytes; minus infinity if none did.
        """
        with self._pushes:
            times = (at for pushed, at in self._pushed_s.items() if pushed <= version)
            return max(times, default=float("-inf"))

    def is_allowed(self, authorization: str) -> bool:
        """Returns whether a request with this header is served; takes the same time for every
        header.
        """
        given = authorization.encode("latin-1", "replace")
        return not self._expected or hmac.compare_digest(given, self._expected)
