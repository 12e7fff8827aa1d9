"""Connections that ask nothing do not lock the explorer out."""

import socket
from contextlib import ExitStack

from rollstream.look.explorer.serving.server import CONNECTIONS_MAX


def test_silent_connections_do_not_lock_the_explorer_out(living):
    with ExitStack() as opened:
        for number in range(2 * CONNECTIONS_MAX):
            connection = socket.create_connection(("127.0.0.1", living.port), timeout=60)
            opened.enter_context(connection)
            connection.sendall(b"GET / HTTP" if number % 2 else b"")
        for _ in range(5):
            assert living.get("/api/runs").status == 200
