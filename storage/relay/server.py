"""Serves a relay's cache over HTTP/1.1 (docs/explanation/relay.md). A path is matched whole and
never becomes a file name. Every error of a request becomes a response or a closed connection.
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
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from rollstream.errors import CorruptObject, StoreError
from rollstream.http_guard import program_rule
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
LINGER_BYTES = 1 << 20  # most bytes of an unwanted body that are read at once
LINGER_S = 2.0  # time for a client to read a response that was sent before its body was read
STALL_S = 60.0  # a transfer without a new byte ends after this
SILENCE_S = 1.0  # between two checks whether a waiting client is still there
# Versions whose last push is remembered. Before the first announcement a client can push a version
# of any name, so the number needs a bound.
PUSHED_MAX = 64


class RelayResponder(HttpResponder):
    protocol_version = "HTTP/1.1"
    timeout = CLIENT_S
    server: "RelayServer"  # pyright: ignore[reportIncompatibleVariableOverride]

    @contextmanager
    def error_responses(self) -> Generator[None]:
        """Turns `ValueError` (a malformed request) into 400, `OSError` into a closed connection."""
        try:
            yield
        except OSError as error:
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
        self.close_connection = True
        self.empty(status, {"Connection": "close"})
        self.connection.shutdown(socket.SHUT_WR)
        # A client that is still sending its body would get a reset, and never read the response, if
        # the connection closed at once: its bytes are first read and discarded.
        deadline_s = time.monotonic() + LINGER_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            if not self.connection.recv(LINGER_BYTES):
                return

    def parse_request(self) -> bool:
        """Reads and checks a request: without the right token it gets 401. Returns whether it is to
        be answered.
        """
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
                is_known = count == after and "brief" in query
                self._json(RelayListing(count, () if is_known else tuple(offers)))
            else:
                send_object(self, self.server.cache, self.server.pace, split.path, query)

    def do_HEAD(self) -> None:
        with self.error_responses():
            cached = self.server.cache.find(parse_key(self.path))
            if cached is None:
                return self.empty(404)
            received = cached.offer.bytes if cached.verified else cached.written
            return self.head(200, cached.offer.bytes, {"X-Received": str(received)})

    def handle_expect_100(self) -> bool:
        """Send no `100 Continue` yet: `receive_push` sends it once the body is wanted."""
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
    """Receives an object from the byte at which `Content-Range` starts to the object's end.

    The response is 201 once the whole object is here and matches `X-Content-Hash`; 422 if it does
    not match (then it is not kept); 413 if it is larger than all that the relay may keep; 409 if
    the object is unwanted, here already or being written by another sender, or if the relay does
    not have exactly the bytes before that start.
    """
    headers = sender.headers
    start, size = parse_push_range(headers.get("Content-Range"), headers.get("Content-Length"))
    offer = ObjectOffer(key, size, headers.get("X-Content-Hash", ""))
    if not offer.is_sound:
        raise ValueError("a push needs X-Content-Hash, 32 hex digits")
    if size > cache.bytes_max:
        return sender.close(413)
    cached = cache.accept(offer) if cache.wants_push(offer) else None
    if cached is None:
        return sender.close(409)
    try:
        with cached.writing():
            if cached.written != start or (cached.verified and size):
                raise ObjectBusy(f"object {key}: it is here up to byte {cached.written}")
            if headers.get("Expect", "").lower() == "100-continue":
                sender.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            _write(sender, cache, cached, on_bytes)
    except (ObjectBusy, ObjectDropped):
        return sender.close(409)
    except CorruptObject as error:
        log.error("%s", error)
        cache.add("relay_wrong_total", 1)
        return sender.close(422)
    cache.completed(cached)
    return sender.empty(201)


def _write(
    sender: RelayResponder, cache: RelayCache, cached: CachedObject, on_bytes: Callable[[], None]
) -> None:
    while not cached.verified:
        count = sender.rfile.readinto1(cached.room())  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise ConnectionError("the push ended in the middle")
        on_bytes()
        cached.advance(count)
        cache.add("relay_pushed_bytes_total", count)


def send_object(
    to: RelayResponder,
    cache: RelayCache,
    pace: BandwidthLimiter,
    path: str,
    query: Mapping[str, str],
) -> None:
    """Sends the object or its range, at most at the rate of `pace`: with `receiving=1` (a
    neighbouring relay) while bytes still arrive, else only once it is offered, within `wait`
    seconds.

    The response is 416 if the range is outside the object, and 404 if the object is not here. If it
    is expected, the 404 has the header `X-Coming`, whose value changes whenever the relay has
    received bytes. A transfer without new bytes ends after `STALL_S`, or when its client closes.
    """
    key = parse_key(path)
    if query.get("receiving") == "1":
        cached = cache.find(key)
    else:
        cached = cache.wait_offered(key, parse_wait(query))
    if cached is None:
        coming = {"X-Coming": str(cache.bytes_received())} if cache.is_expected(key) else {}
        return to.empty(404, coming)
    start, end = parse_range(to.headers.get("Range"), cached.offer.bytes)
    restarts = cached.restarts
    if start is None:
        to.head(200, cached.offer.bytes, {})
    elif start >= end:
        return to.empty(416, {"Content-Range": f"bytes */{cached.offer.bytes}"})
    else:
        content_range = f"bytes {start}-{end - 1}/{cached.offer.bytes}"
        to.head(206, end - start, {"Content-Range": content_range})
    began = start or 0
    try:
        _send(to.connection, pace, cached, began, end, restarts)
    except (ObjectDropped, OSError):  # the client knows from the length that bytes are missing
        to.close_connection = True
    else:
        cache.add("relay_sent_bytes_total", end - began)
    return None


def _send(
    to: socket.socket,
    pace: BandwidthLimiter,
    cached: CachedObject,
    at: int,
    end: int,
    restarts: int,
) -> None:
    """Raises `ObjectDropped` if no bytes arrive, the client left, or the object was dropped or
    begun again.
    """
    moved_s = time.monotonic()
    while at < end:
        received = cached.wait(at, restarts, SILENCE_S)
        if received > at:
            count = min(PIECE_BYTES, min(received, end) - at)
            pace.take(count)
            at += _sendfile(to.fileno(), cached.descriptor, at, count)
            moved_s = time.monotonic()
        elif time.monotonic() - moved_s > STALL_S or _is_gone(to):
            raise ObjectDropped(f"object {cached.key}: the client left, or no bytes arrive")


def _sendfile(to: int, descriptor: int, at: int, count: int) -> int:
    while True:
        try:
            return os.sendfile(to, descriptor, at, count)
        except BlockingIOError:
            if not select.select([], [to], [], CLIENT_S)[1]:
                raise TimeoutError("the client does not read") from None


def _is_gone(client: socket.socket) -> bool:
    if not select.select([client], [], [], 0)[0]:
        return False
    with suppress(BlockingIOError):
        return not client.recv(1, socket.MSG_PEEK)
    return False


class RelayServer(BoundedServer):
    """Keeps the times at which pushes brought bytes: a version that is being pushed is not read
    from the bucket.
    """

    def __init__(
        self,
        address: tuple[str, int],
        cache: RelayCache,
        pace: BandwidthLimiter,
        connections_max: int,
        status: Callable[[], dict[str, Any]],
        token: str = "",
    ) -> None:
        """`pace` limits the send rate; `status` answers `GET /status`. With a `token`, requests
        without it get 401.
        """
        self.cache, self.pace, self.status = cache, pace, status
        self._expected = f"Bearer {token}".encode() if token else b""
        self._pushed_s: dict[Version, float] = {}
        self._pushes = threading.Lock()
        # With a token no page can send a request that is served, whatever name it came by.
        rule = replace(program_rule(address[0]), any_host=bool(token))
        super().__init__(address, RelayResponder, "relay-serve", connections_max, rule)

    def note_push(self, key: str) -> None:
        version = version_of(key)
        with self._pushes:
            if version is not None:
                self._pushed_s[version] = time.monotonic()
            while len(self._pushed_s) > PUSHED_MAX:
                del self._pushed_s[min(self._pushed_s, key=lambda v: self._pushed_s[v])]

    def pushed_s(self, version: Version) -> float:
        """Returns the monotonic time of the last bytes of this version or an older one; minus
        infinity if no push brought bytes. Minus infinity if no push brought bytes.
        """
        with self._pushes:
            times = (at for pushed, at in self._pushed_s.items() if pushed <= version)
            return max(times, default=float("-inf"))

    def is_allowed(self, authorization: str) -> bool:
        header = authorization.encode("latin-1", "replace")
        # In constant time, so that the duration does not reveal the token.
        return not self._expected or hmac.compare_digest(header, self._expected)
