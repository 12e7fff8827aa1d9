"""A real HTTP server that scores or fails as a test says, and remembers what it was asked."""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Asked:
    """One request."""

    path: str
    body: dict
    key: str | None


@dataclass(slots=True)
class JudgingServer:
    """Answers the request number n by `answer(n, body)`: status, headers and body; None: never."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    at_once: int = 0
    at_once_max: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def trajectories(self) -> list[str]:
        return [one.body["trajectory"] for one in self.asked]


Answer = Callable[[int, dict], "tuple[int, dict[str, str], bytes] | None"]


def ok(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps(value).encode()


def judged(text: str) -> tuple[int, dict[str, str], bytes]:
    return ok({"choices": [{"message": {"role": "assistant", "content": text}}]})


@contextmanager
def judging(answer: Answer) -> Generator[JudgingServer]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(one.asked)
                one.asked.append(Asked(self.path, body, self.headers.get("authorization")))
                one.at_once += 1
                one.at_once_max = max(one.at_once_max, one.at_once)
            try:
                given = answer(number, body)
                if given is None:
                    one.ended.wait(600)
                    return
                status, headers, data = given
            finally:  # before the answer, since the client may send its next request at once
                with lock:
                    one.at_once -= 1
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    one = JudgingServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.ended.set()
        server.shutdown()
        server.server_close()
