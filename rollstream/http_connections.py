"""Bounds a uvicorn server, which itself waits for ever: number of connections, size and time of a
request's head, time of its body, and the time that a response is left unread.

At `connections_max` a new connection takes the place of the one that has waited longest for its
client, never of one whose request is being answered.
"""

import asyncio
import resource
from dataclasses import dataclass, field
from typing import Any, cast

# Between two looks at the open connections.
CHECK_S = 0.5


@dataclass(slots=True)
class ConnectionBounds:
    """The bounds of one server, and its open connections."""

    connections_max: int
    head_s: float = 10.0
    body_s: float = 60.0
    unread_s: float = 30.0
    head_bytes_max: int = 64 << 10
    _open: "dict[BoundedConnection, None]" = field(
        default_factory=lambda: dict["BoundedConnection", None]()
    )
    _check: asyncio.TimerHandle | None = None

    def add(self, connection: "BoundedConnection") -> None:
        """Closes one that waits for its client if there are too many."""
        if len(self._open) >= self.connections_max:
            waiting = [other for other in self._open if other.waits_for_client()]
            if waiting:
                min(waiting, key=BoundedConnection.rank).drop()
        self._open[connection] = None
        self._schedule(connection.loop)

    def remove(self, connection: "BoundedConnection") -> None:
        self._open.pop(connection, None)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._check is None and self._open:
            self._check = loop.call_later(CHECK_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for connection in list(self._open):
            if connection.is_late(now_s):
                connection.drop()
        self._check = None
        self._schedule(loop)


class BoundedConnection:
    """Stands before a protocol class of uvicorn in the list of bases. It uses uvicorn's `cycle`,
    the newest request, `connections`, those of its server, and the hooks `on_response_complete` and
    `send_400_response`.
    """

    bounds: ConnectionBounds
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    connections: set[Any]
    _since_s: float
    """When the client's turn began: to send a head, or, within a request, its body."""
    _head_bytes: int
    _requests: int
    _unread: int
    _unread_since_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        cast(Any, super()).connection_made(transport)
        self._since_s = self.loop.time()
        self._head_bytes, self._requests = 0, 0
        self._unread, self._unread_since_s = 0, self._since_s
        self.bounds.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.remove(self)
        cast(Any, super()).connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before, is_head = self.cycle, self._is_between_requests()
        if is_head and not self._head_bytes:
            self._since_s = self.loop.time() if self._requests else self._since_s
        cast(Any, super()).data_received(data)
        if self.cycle is not before:
            self._requests += 1
            self._head_bytes, self._since_s = 0, self.loop.time()
        elif is_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.head_bytes_max:
                self.drop()

    def on_response_complete(self) -> None:
        self._since_s = self.loop.time()
        cast(Any, super()).on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Where an answer has begun, or may have no body (HEAD), the connection ends."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # Else uvicorn lets an earlier request's answer follow, which h11 refuses by an error.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or cycle.scope["method"] == "HEAD":
                self.drop()
                return
        cast(Any, super()).send_400_response(msg)

    def rank(self) -> tuple[bool, float]:
        """The order in which connections are closed: first those without any request."""
        return self._requests > 0, self._since_s

    def waits_for_client(self) -> bool:
        """Whether the client has to send a request or the rest of it, or to read."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def is_late(self, now_s: float) -> bool:
        unread = self.transport.get_write_buffer_size()
        if not unread or unread < self._unread:
            self._unread_since_s = now_s
        self._unread = unread
        if now_s - self._unread_since_s > self.bounds.unread_s:
            return True
        waited_s = now_s - self._since_s
        if self._is_between_requests():
            # uvicorn ends idle connections after a request.
            begun = self._head_bytes > 0 or not self._requests
            return begun and waited_s > self.bounds.head_s
        return self.cycle.more_body and waited_s > self.bounds.body_s

    def _is_between_requests(self) -> bool:
        cycle = self.cycle
        # A response may end before its request's body.
        return cycle is None or (cycle.response_complete and not cycle.more_body)

    def drop(self) -> None:
        self.bounds.remove(self)
        # uvicorn counts it until the loop has seen its end, which is after a new connection.
        self.connections.discard(self)
        self.transport.abort()


def bounded_protocol(bounds: ConnectionBounds, kind: str = "auto") -> type[asyncio.Protocol]:
    """Returns the bounded protocol for `uvicorn.Config(http=…)`: uvicorn's h11, or with `auto`
    httptools where it is installed.
    """
    if kind == "h11":
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
    else:
        from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol
    protocol: Any = type("BoundedProtocol", (BoundedConnection, Protocol), {"bounds": bounds})
    return protocol


def connections_allowed(limit: int) -> int:
    """`limit`, or half of the files that this process may open: without free files no connection
    could be accepted, nor an old one closed.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if files == resource.RLIM_INFINITY else max(8, min(limit, files // 2))
