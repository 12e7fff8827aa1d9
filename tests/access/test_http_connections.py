"""Silent, slow and greedy clients take no server away from others: connections have bounds of
number, time and size.
"""

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollstream.http_connections import ConnectionBounds, connections_allowed
from rollstream.producers.agents import serving
from rollstream.producers.agents.serving import EndpointThread
from rollstream.run.metrics import endpoint as metrics_endpoint
from rollstream.run.metrics.endpoint import TEXT, serve_pages
from testbed.waiting import wait_for

MANY = 64
LARGE = b"x" * (32 << 20)


async def _length(request: Request) -> Response:
    try:
        return Response(str(len(await request.body())))
    except ClientDisconnect:
        return Response()


async def _large(request: Request) -> Response:
    return Response(LARGE)


@dataclass
class BoundedServers:
    """Starts servers of agents with given bounds, which are in `made`."""

    monkeypatch: pytest.MonkeyPatch
    opened: ExitStack
    made: list[ConnectionBounds] = field(default_factory=list[ConnectionBounds])

    def __call__(self, **bounds: Any) -> int:
        """Returns the port of a new server."""

        def bound(most: int) -> ConnectionBounds:
            self.made.append(ConnectionBounds(most, **bounds))
            return self.made[-1]

        self.monkeypatch.setattr(serving, "CONNECTIONS_MAX", MANY)
        self.monkeypatch.setattr(serving, "ConnectionBounds", bound)
        routes = [Route("/", _length, methods=["GET", "POST"]), Route("/large", _large)]
        endpoint = EndpointThread(Starlette(routes=routes), "127.0.0.1:0")
        endpoint.start()
        self.opened.callback(endpoint.close)
        return endpoint.port


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedServers]:
    with ExitStack() as opened:
        yield BoundedServers(monkeypatch, opened)


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(data)
    return connection


def status(port: int, path: str = "/") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def is_ended(connection: socket.socket) -> bool:
    """Waits for the end of a connection, by the server's close or reset."""
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nab"],
    ids=["silent", "head", "body"],
)
def test_waiting_connections_give_their_places_to_new_ones(bounded, sent):
    port = bounded()
    with ExitStack() as opened:
        waiting = [opened.enter_context(connect(port, sent)) for _ in range(MANY + 40)]
        assert [status(port) for _ in range(5)] == [200] * 5
        assert is_ended(waiting[0])


def test_metrics_are_served_beside_silent_connections(monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "CLIENT_S", 60.0)
    server = serve_pages("127.0.0.1", 0, {"/": lambda accept: (200, TEXT, b"m\n")})
    try:
        with ExitStack() as opened:
            sent = (b"", b"GET / HT")
            waiting = [opened.enter_context(connect(server.port, sent[i % 2])) for i in range(40)]
            assert [status(server.port) for _ in range(5)] == [200] * 5
            assert is_ended(waiting[0])
    finally:
        server.end()


def test_a_head_that_arrives_byte_by_byte_is_ended(monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "CLIENT_S", 1.0)
    server = serve_pages("127.0.0.1", 0, {"/": lambda accept: (200, TEXT, b"m\n")})
    try:
        assert trickled(server.port)
    finally:
        server.end()


def test_an_agents_head_that_arrives_byte_by_byte_is_ended(bounded):
    assert trickled(bounded(head_s=1.0))


def trickled(port: int) -> bool:
    """Sends a head by single bytes, each well within a second, until the server ends it."""
    began_s = time.monotonic()
    with connect(port, b"GET / HTTP/1.1\r\nHost: a\r\nX: ") as connection:
        connection.settimeout(0.2)
        while time.monotonic() - began_s < 60:
            try:
                connection.sendall(b"x")
                if not connection.recv(1):
                    return True
            except TimeoutError:
                continue
            except ConnectionError:
                return True
    return False


def test_a_body_that_does_not_arrive_is_ended(bounded):
    port = bounded(body_s=1.0)
    with connect(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nab") as connection:
        assert is_ended(connection)


def test_a_response_that_is_not_read_is_dropped(bounded):
    port = bounded(unread_s=1.0)
    with connect(port, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n") as connection:
        first = connection.recv(1)  # the response has begun; from here on nothing is read
        wait_for(lambda: not bounded.made[-1]._open)
        received = 0
        with suppress(ConnectionError):
            while part := connection.recv(1 << 20):
                received += len(part)
        assert first
        assert received < len(LARGE)


def test_a_head_has_a_largest_size(bounded):
    port = bounded(head_bytes_max=4096)
    with connect(port, b"GET / HTTP/1.1\r\nHost: a\r\n") as connection:
        try:
            for number in range(20_000):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"x" * 200))
            ended = False
        except ConnectionError:
            ended = True
        assert ended or is_ended(connection)


def test_an_idle_connection_after_a_request_stays_open(bounded):
    port = bounded(head_s=0.5)
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    kept.request("POST", "/", b"abc")
    assert kept.getresponse().read() == b"3"
    with connect(port) as silent:  # is ended after `head_s`, when the kept one is older
        assert is_ended(silent)
    kept.request("POST", "/", b"abcd")
    assert kept.getresponse().read() == b"4"
    kept.close()


def test_the_number_of_connections_fits_the_files_that_may_be_opened():
    assert 8 <= connections_allowed(1 << 40) <= 1 << 40
    assert connections_allowed(16) <= 16
