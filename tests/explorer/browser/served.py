"""`rollstream explore` as a process of a test, and a host of static files with byte ranges."""

import re
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from testbed.run_process import running
from testbed.waiting import wait_for

PRINTED = re.compile(r"^explorer: (http://\S+?)/?$", re.MULTILINE)
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'"


@contextmanager
def served(runs: Sequence[Path], work: Path, *options: str) -> Generator[str]:
    """Starts the server over `runs` and gives its origin."""
    output = work / "explore.txt"
    names = [str(run) for run in runs]
    line = [sys.executable, "-m", "rollstream", "explore", *names, "--no-browser", "--port", "0"]
    with running([*line, *options], output) as process:
        found = wait_for(
            lambda: PRINTED.search(output.read_text()), process, lambda: output.read_text()
        )
        yield found[1]


class RangeHandler(SimpleHTTPRequestHandler):
    """Sends files with the policy of the server, and parts of them on request."""

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
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()


@contextmanager
def file_host(folder: Path) -> Generator[str]:
    """Serves a folder as any host of static files does, and gives its origin."""

    def handler(*given: object) -> RangeHandler:
        return RangeHandler(*given, directory=str(folder))  # pyright: ignore[reportArgumentType]

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
