"""A proxy in the environment gets no request to this machine or to the processes of a run."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollstream.http_proxies import is_this_machine, may_use_proxy, open_direct, without_proxy
from rollstream.run.cli.main import main
from testbed.first_hour.case import FirstHourCase
from testbed.servers.variables import environment

KIND = "a proxy in the environment"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


class _Answer(BaseHTTPRequestHandler):
    """Answers every request, and notes those that came as to a proxy."""

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(size)
        seen: list[str] = getattr(self.server, "seen")  # noqa: B009 (set beside the server)
        seen.append(self.path)
        is_deleting = self.command == "DELETE"  # of an object store
        body = b"" if is_deleting else b'{"run": "r", "role": "train", "state": "running"}'
        self.send_response(204 if is_deleting else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def _server() -> Generator[tuple[int, list[str]]]:
    """A server of this machine: its port, and the paths that were asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    seen: list[str] = []
    vars(server)["seen"] = seen
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))
    thread.start()
    try:
        yield server.server_port, seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _proxied(**more: str) -> Generator[None]:
    """The environment names a proxy that nobody runs."""
    names = [name for one in (*VARIABLES, "no_proxy") for name in (one, one.upper())]
    given = dict.fromkeys(VARIABLES, "http://127.0.0.1:9")
    with environment({**dict.fromkeys(names), **given, **more}):
        yield


def _health(folder: Path) -> str:
    with _proxied(), _server() as (port, seen):
        code = main(["health", "--port", str(port)])
    return "" if (code, seen) == (0, ["/healthz"]) else f"exit code {code}, asked {seen}"


def _scraped(folder: Path) -> str:
    with _proxied(), _server() as (port, seen), open_direct(f"http://localhost:{port}/m", 9) as got:
        return "" if (got.status, seen) == (200, ["/m"]) else f"{got.status}, asked {seen}"


def _store(folder: Path) -> str:
    from rollstream.storage.stores.s3.address import parse_s3_url
    from rollstream.storage.stores.s3.client import S3Client
    from rollstream.storage.stores.s3.errors import S3Failure, time_limits

    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with _proxied(**keys), _server() as (port, seen):
        url = f"s3://bucket/p?endpoint=http://127.0.0.1:{port}&region=us-east-1"
        try:
            S3Client(parse_s3_url(url), time_limits(2.0)).delete("p/key")
        except S3Failure as failure:
            return str(failure)
    return "" if seen == ["/bucket/p/key"] else f"asked {seen}"


def _judge(host: str, is_proxied: bool, no_proxy: str, folder: Path) -> str:
    """The client of a reward service, as its pool makes it."""
    import httpx2

    with _proxied(no_proxy=no_proxy) if no_proxy else _proxied():
        url = f"http://{host}/v1/score"
        with httpx2.Client(trust_env=may_use_proxy(url)) as client:
            transport = client._transport_for_url(httpx2.URL(url))  # pyright: ignore[reportPrivateUsage]
            is_direct = transport is client._transport  # pyright: ignore[reportPrivateUsage]
    return "" if is_direct is not is_proxied else f"{host}: direct {is_direct}"


def _program(folder: Path) -> str:
    before = {"http_proxy": "http://proxy:3128", "no_proxy": "a.example, b.example"}
    found = without_proxy(before, "http://10.0.0.7:4000/v1")
    needed = "a.example,b.example,10.0.0.7"
    return "" if found == {"no_proxy": needed, "NO_PROXY": needed} else str(found)


def _names(folder: Path) -> str:
    here = ("localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "0.0.0.0", "LOCALHOST.")
    here += ("::ffff:127.0.0.1", "a.localhost", "::1%lo")
    there = ("10.0.0.7", "localhost.example.org", "example.org", "2001:db8::1", "127.example.org")
    wrong = [name for name in here if not is_this_machine(name)]
    wrong += [name for name in there if is_this_machine(name)]
    return f"misjudged: {wrong}" if wrong else ""


PROXY_CASES = (
    FirstHourCase("proxy: rollstream health", KIND, _health),
    FirstHourCase("proxy: a scrape of this machine", KIND, _scraped),
    FirstHourCase("proxy: a store of this machine", KIND, _store),
    FirstHourCase(
        "proxy: a judge of this machine", KIND, partial(_judge, "localhost:9", False, "")
    ),
    FirstHourCase("proxy: a judge elsewhere", KIND, partial(_judge, "judge.example", True, "")),
    FirstHourCase(
        "proxy: a judge that no_proxy names",
        KIND,
        partial(_judge, "judge.example", False, "judge.example"),
    ),
    FirstHourCase("proxy: a program of an agent", KIND, _program),
    FirstHourCase("proxy: names of this machine", KIND, _names),
)
