"""A process's HTTP endpoint: `/metrics` for Prometheus, `/healthz`, and a file with its address.

`RUN/metrics/endpoints/<name>.json` is replaced by each start under that name and removed at a clean
end; after `kill -9` it stays until the next start. No error here ends a role: if the address is
unavailable, the role logs a warning and works without metrics.

The server never blocks its role: more than `REQUESTS_MAX` concurrent requests are refused, a client
that stops reading or writing is dropped, and an error of a page is logged and answered with 500.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import quote

from rollstream.config.run_folder import RunFolder
from rollstream.config.settings import Configuration
from rollstream.config.sources import METRICS_PORT
from rollstream.metrics.process import ProcessMetrics

log = logging.getLogger(__name__)

REQUESTS_MAX = 8
CLIENT_S = 5.0  # longest read or write of a client
LOOK_S = 0.2  # interval at which the server checks for shutdown


@dataclass(frozen=True, slots=True)
class PageResponse:
    """One HTTP response."""

    status: int
    kind: str
    body: bytes


PageHandler = Callable[[str], PageResponse]
"""Returns the response to a request with this `Accept` header."""


class MetricsServer(ThreadingHTTPServer):
    """Serves until `end`; raises `OSError` if the address is unavailable."""

    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Mapping[str, PageHandler]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._free = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__((host, port), _handler(pages))
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_S,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound port, also if port 0 was requested."""
        return int(self.server_address[1])

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Skips the look-up of the host's full name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a client disconnected", exc_info=True)


def _handler(pages: Mapping[str, PageHandler]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S
        server_version = "rollstream"

        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, with_body: bool) -> None:
            answer = _answer(pages, self.path.partition("?")[0], self.headers.get("Accept", ""))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if with_body:
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return Handler


def _answer(pages: Mapping[str, PageHandler], path: str, accept: str) -> PageResponse:
    page = pages.get(path)
    if page is None:
        known = ", ".join(sorted(pages))
        return PageResponse(404, "text/plain; charset=utf-8", f"served here: {known}\n".encode())
    try:
        return page(accept)
    except Exception:
        log.exception("metrics: %s failed", path)
        return PageResponse(
            500, "text/plain; charset=utf-8", b"this page failed; see the role's log\n"
        )


def endpoint_file(folder: Path, name: str) -> Path:
    """Returns the path of the file with the endpoint's address."""
    return RunFolder(folder).metrics / "endpoints" / f"{quote(name, safe='')}.json"


def metrics_port(configuration: Configuration, environment: Mapping[str, str]) -> int:
    """Returns the port of this process: `ROLLSTREAM_METRICS_PORT`, which the supervisor sets for
    each role and compose for each service, else the setting `metrics.port`. 0 means any free port.
    """
    text = environment.get(METRICS_PORT, "")
    if not text:
        return configuration.metrics.port
    if not text.isdecimal() or int(text) > 65535:
        log.warning("%s=%r is not a port; using metrics.port", METRICS_PORT, text)
        return configuration.metrics.port
    return int(text)


@contextmanager
def serve_metrics(
    configuration: Configuration,
    folder: Path,
    role: str,
    name: str,
    watch: ProcessMetrics,
    environment: Mapping[str, str] = os.environ,
) -> Generator[None]:
    """Serve the metrics of `watch` while the block runs, unless `metrics.enabled` is off."""
    server = None
    if configuration.metrics.enabled:
        labels = {"run": configuration.run, "role": role, "name": name}
        server = _open(
            configuration, folder, labels, watch, metrics_port(configuration, environment)
        )
    try:
        yield
    finally:
        if server is not None:
            server.end()
            _remove_file(endpoint_file(folder, name))


def _open(
    configuration: Configuration,
    folder: Path,
    labels: dict[str, str],
    watch: ProcessMetrics,
    port: int,
) -> MetricsServer | None:
    host, file = configuration.metrics.host, endpoint_file(folder, labels["name"])
    try:
        server = MetricsServer(host, port, _pages(watch, labels, configuration.metrics.stalled_s))
    except (OSError, OverflowError) as error:
        log.warning(
            "no metrics: %s port %d is unavailable (%s); free it, or set metrics.port "
            "(now %d; 0 takes a free one) or %s to another; the role continues without metrics",
            host,
            port,
            error,
            configuration.metrics.port,
            METRICS_PORT,
        )
        file.unlink(missing_ok=True)  # left by a dead process; another program may own its port now
        return None
    try:
        _write(file, {**labels, "pid": os.getpid(), "host": host, "port": server.port})
    except OSError as error:
        log.warning("metrics: %s cannot be written: %s", file, error)
    log.info("metrics and /healthz on %s", _url(host, server.port))
    return server


def _pages(
    watch: ProcessMetrics, labels: Mapping[str, str], stalled_s: float
) -> dict[str, PageHandler]:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    from rollstream.metrics.collector import MetricsCollector

    registry = CollectorRegistry()
    registry.register(MetricsCollector(watch, labels))

    def metrics(accept: str) -> PageResponse:
        encode, kind = choose_encoder(accept)
        return PageResponse(200, kind, encode(registry))

    def health(accept: str) -> PageResponse:
        now = watch.health(stalled_s)
        body = {**labels, "state": now.state, "turn_age_s": round(now.turn_age_s, 3)}
        status = 503 if now.state == "stalled" else 200
        return PageResponse(status, "application/json", json.dumps(body).encode() + b"\n")

    return {"/metrics": metrics, "/healthz": health}


def _write(file: Path, values: Mapping[str, str | int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    url = _url(str(values["host"]), int(values["port"]))
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({**values, "url": url, "started_s": time.time()}) + "\n")
    os.replace(partial, file)


def _url(host: str, port: int) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"http://{reached}:{port}"


def _remove_file(file: Path) -> None:
    """Remove the file if this process wrote it; a successor of the same name may have
    replaced it.
    """
    try:
        if json.loads(file.read_text())["pid"] == os.getpid():
            file.unlink()
    except (OSError, ValueError, KeyError):
        log.debug("metrics: %s is already gone", file)
