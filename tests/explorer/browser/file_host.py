"""A host of static files that answers byte ranges, as object stores and web servers do."""

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'"


class RangeHandler(SimpleHTTPRequestHandler):
    """Sends files with a content security policy, and parts of them on request."""

    policy: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        start, end = int(asked[1]), min(len(data) - 1, int(asked[2] or len(data) - 1))
        self.send_response(206)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        self.wfile.write(data[start : end + 1])

    def end_headers(self) -> None:
        if self.policy:
            self.send_header("Content-Security-Policy", self.policy)
        super().end_headers()


@contextmanager
def file_host(folder: Path, policy: str = POLICY) -> Generator[str]:
    """Serves a folder as any host of static files does, and gives its origin. Without a policy
    its pages may do what they like, as pages of other projects need.
    """
    handler = partial(type("Handler", (RangeHandler,), {"policy": policy}), directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
