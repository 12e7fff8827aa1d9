"""A relay's HTTP/1.1 client: bytes go from the socket into the caller's (shared) memory, and a
silence within a body does not break the connection. The standard library's client can do neither.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec

from rollstream.errors import ConfigurationError, StoreError
from rollstream.foreign_json import parse_json
from rollstream.storage.relay.object import ObjectOffer
from rollstream.storage.stores.base import Data

PIECE_BYTES = 256 << 10  # per send call: at 25 MB/s ten pieces take a tenth of a second
BURST_S = 0.02  # after idle time a sender may send the bytes of this many seconds at once
HEAD_BYTES_MAX = 16 << 10  # status line and headers of a response
ANSWER_BYTES_MAX = 8 << 20  # largest body that is read whole, such as a listing
CONNECT_S = 1.0
SEND_S = 3.0  # the relay must accept a piece within this
SILENCE_S = 1.0
"""After so long without a byte a reader checks whether the relay lives: it may itself wait."""
TOKEN_VARIABLE = "ROLLSTREAM_RELAY_TOKEN"
"""The environment variable with the secret that relays and their clients share."""
_STATUS, _LENGTH = re.compile(r"[0-9]{3}"), re.compile(r"[0-9]{1,15}")
_TOKEN_PATTERN = re.compile(r"[\x21-\x7e]{8,512}")


class BandwidthLimiter:
    """Limits all threads that share this object to `bytes_per_s` together; 0: no limit."""

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, count: int) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            self._free_s = max(self._free_s, now - BURST_S) + count / self._bytes_per_s
            wait_s = self._free_s - now
        if wait_s > 0:
            self._sleep(wait_s)


def shared_token() -> str:
    """Returns "" if the variable is not set. Raises `ConfigurationError` if it is malformed. No
    error and no log contains it.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and _TOKEN_PATTERN.fullmatch(token) is None:
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} must have 8 to 512 characters of ASCII, without spaces"
        )
    return token


def needed_token(host: str) -> str:
    """Returns "" if none is needed. Raises `ConfigurationError` if other machines could reach the
    relay and there is none.
    """
    token = shared_token()
    if not token and not _is_loopback(host):
        raise ConfigurationError(
            f"relay.host {host}: other machines reach this address, so relays, rollouts and the "
            f"trainer need a shared secret: set {TOKEN_VARIABLE} to the same value in the "
            'environment of each (openssl rand -hex 32), or set relay.host = "127.0.0.1"'
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        addresses = {at[4][0] for at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:  # a part of the name is empty or too long
        raise ConfigurationError(f"relay.host {host}: no such address: {error}") from None
    return all(ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def token_header() -> dict[str, str]:
    token = shared_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


class RelayLost(StoreError):
    """The relay cannot be reached, does not respond in time, or does not speak HTTP. The connection
    is unusable.
    """


class RelayRefused(StoreError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RelayListing(msgspec.Struct, frozen=True):
    """What a relay has or is receiving. `count` is the number of changes so far."""

    count: int
    objects: tuple[ObjectOffer, ...]


class RelayConnection:
    """After `request`, or `send_head`, `send_body` and `read_head`, the response's body is read,
    with `body` or `receive_into`. Every wait has a bound: beyond it `receive_into` returns 0, and
    every other method raises `RelayLost`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            split = urlsplit(url)  # from another program's status record: it may not be a URL
            split.netloc.encode("ascii")  # it is sent as the header `Host`
            self._socket = socket.create_connection(
                (split.hostname or "", split.port or 80), CONNECT_S
            )
        except (OSError, ValueError) as error:
            raise RelayLost(f"relay {url}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = split.netloc
        self._buffered = b""

    def __enter__(self) -> "RelayConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def is_open(self) -> bool:
        """Returns whether another request can be sent: the relay has not closed the connection, nor
        sent bytes that no request asked for.
        """
        if self._buffered:
            return False  # unread bytes: the next response would begin with them
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        wait_s: float = CONNECT_S,
    ) -> tuple[int, dict[str, str]]:
        """Sends a request; returns the response's status and headers (names in lower case). The
        caller must read the body next.
        """
        self.send_head(method, target, headers or {})
        return self.read_head(wait_s)

    def send_head(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in {**token_header(), **headers}.items()]
        self._send("\r\n".join([*lines, "", ""]).encode("ascii"))

    def send_body(self, data: Data, pace: BandwidthLimiter) -> int:
        """Sends at the rate of `pace`; returns the size in bytes. Raises `RelayLost` if the relay
        accepts none for `SEND_S`.
        """
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            pace.take(len(piece))
            self._send(piece)
        return len(view)

    def read_head(self, wait_s: float) -> tuple[int, dict[str, str]]:
        head, deadline_s = self._buffered, time.monotonic() + wait_s
        while b"\r\n\r\n" not in head:
            left_s = deadline_s - time.monotonic()
            piece = self._receive_some(max(0.01, left_s)) if left_s > 0 else None
            if piece is None or len(head) > HEAD_BYTES_MAX:
                raise RelayLost(f"relay {self.url}: no response within {wait_s:g} s")
            head += piece
        head, _, self._buffered = head.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not first.startswith("HTTP/1.") or not _STATUS.fullmatch(parts[1]):
            raise RelayLost(f"relay {self.url}: answered {first[:80]!r}")
        pairs = (line.partition(":") for line in lines)
        return int(parts[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    def receive_into(self, view: memoryview, wait_s: float = SILENCE_S) -> int:
        """Reads into `view`; returns the number of bytes, 0 if none arrived within `wait_s`; then
        the call may be repeated.
        """
        if self._buffered:
            count = min(len(view), len(self._buffered))
            view[:count] = self._buffered[:count]
            self._buffered = self._buffered[count:]
            return count
        self._socket.settimeout(wait_s)
        try:
            count = self._socket.recv_into(view)
        except TimeoutError:
            return 0
        except OSError as error:
            raise RelayLost(f"relay {self.url}: {error}") from error
        if not count:
            raise RelayLost(f"relay {self.url} closed the connection")
        return count

    def body(self, headers: Mapping[str, str], wait_s: float) -> bytes:
        """Returns the body, at most `ANSWER_BYTES_MAX`; it must arrive within `wait_s`."""
        size = body_length(headers)
        if size > ANSWER_BYTES_MAX:
            raise RelayLost(f"relay {self.url}: a response of {size} bytes")
        content = bytearray(size)
        at, deadline_s = 0, time.monotonic() + wait_s
        with memoryview(content) as view:
            while at < size:
                at += self.receive_into(view[at:], max(0.01, deadline_s - time.monotonic()))
                if time.monotonic() > deadline_s:
                    raise RelayLost(f"relay {self.url}: no body within {wait_s:g} s")
        return bytes(content)

    def listing(self, after: int = -1, wait_s: float = 0.0) -> RelayListing:
        """Returns the list as soon as the `count` differs from `after`; after `wait_s` the list may
        be empty. Raises `RelayRefused` if the relay responds with an error.
        """
        target = f"/objects?after={after}&wait={wait_s:g}&brief=1"
        status, headers = self.request("GET", target, wait_s=wait_s + CONNECT_S)
        body = self.body(headers, CONNECT_S)
        if status != 200:
            raise RelayRefused(status, f"relay {self.url}: status {status} for its listing")
        try:
            return parse_json(body, RelayListing)
        except ValueError as error:
            raise RelayLost(f"relay {self.url}: not a listing: {error}") from error

    def _receive_some(self, wait_s: float) -> bytes | None:
        piece = bytearray(HEAD_BYTES_MAX)
        with memoryview(piece) as view:
            self._socket.settimeout(wait_s)
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                return None
            except OSError as error:
                raise RelayLost(f"relay {self.url}: {error}") from error
        if not count:
            raise RelayLost(f"relay {self.url} closed the connection")
        return bytes(piece[:count])

    def _send(self, data: Data) -> None:
        self._socket.settimeout(SEND_S)
        try:
            self._socket.sendall(data)
        except OSError as error:  # also after `SEND_S` without progress
            raise RelayLost(f"relay {self.url}: {error}") from error


def body_length(headers: Mapping[str, str]) -> int:
    """Returns the size in bytes; 0 if the headers do not state it in at most 15 digits."""
    text = headers.get("content-length", "")
    return int(text) if _LENGTH.fullmatch(text) else 0
