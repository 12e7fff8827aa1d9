"""Sends an object of a relay: its bytes as they arrive, straight from shared memory, rate-limited.

A neighbour (`receiving=1`) gets bytes that are not verified yet; all others get verified objects
only. A transfer without new bytes ends after `STALL_S`, or when its client closes.
"""

import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from rollstream.storage.relay.answers import CLIENT_S, HttpResponder
from rollstream.storage.relay.names import parse_key, parse_range, parse_wait
from rollstream.storage.relay.object import CachedObject, ObjectDropped
from rollstream.storage.relay.pace import PIECE_BYTES, BandwidthLimiter
from rollstream.storage.relay.cache import RelayCache

STALL_S = 60.0  # without a new byte, the transfer ends
SILENCE_S = 1.0  # between two checks whether a waiting client is still there


def send_object(to: HttpResponder, shelf: RelayCache, pace: BandwidthLimiter, path: str, query: Mapping[str, str]) -> None:
    """Send the object or a range of it; 404 if it is not here, 416 if the range is outside it."""
    key = parse_key(path)
    if query.get("receiving") == "1":
        held = shelf.find(key)
    else:
        held = shelf.wait_offered(key, parse_wait(query))
    if held is None:
        coming = {"X-Coming": str(shelf.bytes_received())} if shelf.is_expected(key) else {}
        return to.empty(404, coming)
    start, end = parse_range(to.headers.get("Range"), held.offer.bytes)
    restarts = held.restarts
    if start is None:
        to.head(200, held.offer.bytes, {})
    elif start >= end:
        return to.empty(416, {"Content-Range": f"bytes */{held.offer.bytes}"})
    else:
        said = f"bytes {start}-{end - 1}/{held.offer.bytes}"
        to.head(206, end - start, {"Content-Range": said})
    began = start or 0
    try:
        _send(to.connection, pace, held, began, end, restarts)
    except (ObjectDropped, OSError):  # the client knows from the length that bytes are missing
        to.close_connection = True
    else:
        shelf.add("relay_sent_bytes_total", end - began)
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
    """Whether the client closed the connection while the relay waits for bytes."""
    if not select.select([client], [], [], 0)[0]:
        return False
    with suppress(BlockingIOError):
        return not client.recv(1, socket.MSG_PEEK)
    return False
