"""A program that is none of ours and answers every request on its port with the same bytes."""

import socketserver
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def foreign_server(answer: bytes) -> Generator[int]:
    """Yields the port of 127.0.0.1 on which it listens."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
