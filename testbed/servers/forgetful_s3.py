"""A server with enough of S3 for small objects that ignores the given conditions, as some servers
do: it answers 200 where S3 answers 412.
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            before = self.server.objects.get(self._name())
            wanted = self.headers.get("If-Match")
            if before is not None and self._keeps("If-None-Match"):
                return self._answer(412)
            if self._keeps("If-Match") and (before is None or before[1] != wanted):
                return self._answer(404 if before is None else 412)
            etag = f'"{md5(body).hexdigest()}"'
            metadata = {
                n: v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")
            }
            self.server.objects[self._name()] = body, etag, metadata
        return self._answer(200, {"ETag": etag})

    def do_GET(self) -> None:
        found = self.server.objects.get(self._name())
        if found is None:
            return self._answer(404)
        body, etag, metadata = found
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = body[int(first) : int(last) + 1 if last else None]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        return self._answer(206, {"ETag": etag, "Content-Range": span, **metadata}, part)

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._name(), None)
        self._answer(204)

    def _keeps(self, header: str) -> bool:
        return self.headers.get(header) is not None and header not in self.server.forgets

    def _name(self) -> str:
        return urlsplit(self.path).path

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> None:
        if status in (404, 412):
            code = "NoSuchKey" if status == 404 else "PreconditionFailed"
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, forgets: tuple[str, ...]) -> None:
        self.forgets, self.lock = forgets, threading.Lock()
        self.objects: dict[str, tuple[bytes, str, dict[str, str]]] = {}
        super().__init__(("127.0.0.1", 0), _Handler)


@contextmanager
def serving(*forgets: str) -> Generator[tuple[str, dict[str, Any]]]:
    """The URL of an empty prefix on it, and its objects; `forgets` are names of ignored headers."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "forgetful")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "forgetful")
    server = _Server(forgets)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        yield f"s3://bucket/run?endpoint={address}&region=us-east-1", server.objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
