"""Damaged requests over a socket, and what a server did with them (`exchange`).

Each server here answers a damaged request by a response of HTTP or by the end of the connection:
no 5xx of an error that nothing foresaw, and the next request is served.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from testbed.hostile.damage import changed_bytes

READ_S = 60.0
FORESEEN = {501, 503, 505}
"""Of 5xx: a method or version that is not served, and busy."""
HEADERS = (
    b"Content-Length: 9", b"Content-Length: -1", b"Content-Length: 9, 9", b"Content-Length: \xb2",
    b"Content-Length: 99999999999999999999", b"Transfer-Encoding: chunked", b"Host: a.example",
    b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: gzip", b"Expect: 100-continue",
    b"Connection: keep-alive", b"Connection: Upgrade\r\nUpgrade: websocket", b"Upgrade: h2c",
    b"Range: bytes=0-5", b"Range: bytes=9999999999999999999999-", b"Cookie: a=\xff; =;b", b": x",
    b" folded", b"X: \x00", b"X" * 70_000, b"Accept-Encoding: gzip;q=x", b"Host:", b"Origin: null",
    b"If-None-Match: \xe9", b"Authorization: Bearer \xff\xfe", b"Content-Type: a;charset=x\xff",
    b"Idempotency-Key: \xf0\x9f", b"Sec-Fetch-Site: cross-site", b"Accept: \xff;q=1e999,",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"[", b"9" * 5000, b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"g\r\n",
    b"5;x=y\r\nhello\r\n0\r\nX: y\r\n\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n",
    b"5\nhello\n0\n\n",
)  # fmt: skip
TARGETS = (
    b"*", b"//", b"/..%2f..", b"/%", b"/%00", b"/\xff", b"http://a/", b"http://[::1", b"", b"/?a&a",
    b"/?" + b"x=1&" * 200, b"/" + b"a/" * 2000, b"/?limit=%ff", b"/#", b"?", b"a:1", b"/%c0%af",
)  # fmt: skip
METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"get", b"G\xcbT", b"CONNECT")


@dataclass(frozen=True, slots=True)
class ServerRoutes:
    """Names a server's port, its routes, and one that answers 200."""

    port: int
    paths: Sequence[str]
    alive: str

    @property
    def host(self) -> bytes:
        return b"Host: 127.0.0.1:%d" % self.port


def damaged_request(drawn: Random, server: ServerRoutes) -> bytes:
    """Returns one to three requests, one after the other, of which some parts are odd."""
    return b"".join(_request(drawn, server) for _ in range(drawn.choice((1, 1, 1, 2, 3))))


def _request(drawn: Random, server: ServerRoutes) -> bytes:
    target = drawn.choice(server.paths).encode()
    if drawn.randrange(3) == 0:
        target = drawn.choice((target + drawn.choice(TARGETS), drawn.choice(TARGETS)))
    version = drawn.choice((b"HTTP/1.1",) * 5 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"x"))
    line = b" ".join((drawn.choice(METHODS), target, version))
    headers = [server.host] if drawn.randrange(5) else []
    headers += [drawn.choice(HEADERS) for _ in range(drawn.randint(0, 3))]
    data = b"\r\n".join((line, *headers, b"", b"")) + drawn.choice(BODIES)
    return data if drawn.randrange(3) else changed_bytes(drawn, data)


def exchange(server: ServerRoutes, data: bytes, is_whole: bool = False) -> list[int]:
    """Send the bytes, and return the statuses of the responses until the server ends the
    connection. Unless they are a whole request that asks for that end, the sending half is closed,
    so that no server waits for more.
    """
    received = bytearray()
    with socket.create_connection(("127.0.0.1", server.port), timeout=READ_S) as connection:
        with suppress(OSError):  # it may have ended the connection already
            connection.sendall(data)
            if not is_whole:
                connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                received += part
    return list(statuses(bytes(received)))


def statuses(data: bytes) -> Iterator[int]:
    """Yields the status of each response; an answer to HTTP 0.9 is a body without one."""
    for line in data.split(b"\n"):
        if line.startswith(b"HTTP/1."):
            yield int(line.split()[1])


def is_alive(server: ServerRoutes) -> bool:
    """Whether a plain request is answered with 200."""
    return asked(server, server.alive) == 200


def asked(server: ServerRoutes, target: str) -> int:
    """Returns the status of a plain request."""
    request = b"GET %s HTTP/1.1\r\n%s\r\nConnection: close\r\n\r\n"
    (status,) = exchange(server, request % (target.encode(), server.host), is_whole=True)
    return status


def unforeseen(answers: Sequence[int]) -> list[int]:
    """Returns the statuses that no request may get."""
    return [status for status in answers if status >= 500 and status not in FORESEEN]
