"""A process's HTTP endpoint: `/metrics` for Prometheus, `/healthz`, and a file with its address.

`RUN/metrics/endpoints/<name>.json` is replaced by each start under that name and removed at a clean
end; after `kill -9` it stays until the next start. No error here ends a role: if the address is
unavailable, the role logs a warning and works without metrics.

An error of a page is logged and answered with 500.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rollstream.config.run_folder import RunFolder
from rollstream.config.settings import Configuration
from rollstream.config.sources import METRICS_PORT
from rollstream.http_server import BoundedServer, HttpResponder
from rollstream.metrics.collector import MetricsCollector, ProcessMetrics

log = logging.getLogger(__name__)

REQUESTS_MAX = 8
CLIENT_S = 5.0  # longest read or write of a client


PageResponse = tuple[int, str, bytes]
"""Status, content type and body."""
PageHandler = Callable[[str], PageResponse]
"""Returns the response to a request with this `Accept` header."""
TEXT = "text/plain; charset=utf-8"


def serve_pages(host: str, port: int, pages: Mapping[str, PageHandler]) -> BoundedServer:
    """Serve these paths until `end`; raises `OSError` if the address is unavailable."""

    class Responder(HttpResponder):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            path, accept = self.path.partition("?")[0], self.headers.get("Accept", "")
            with suppress(ConnectionError):
                self.content(*_answer(pages, path, accept))

        do_HEAD = do_GET

    return BoundedServer((host, port), Responder, "metrics", REQUESTS_MAX)


def _answer(pages: Mapping[str, PageHandler], path: str, accept: str) -> PageResponse:
    page = pages.get(path)
    if page is None:
        known = ", ".join(sorted(pages))
        return 404, TEXT, f"served here: {known}\n".encode()
    try:
        return page(accept)
    except Exception:
        log.exception("metrics: %s failed", path)
        return 500, TEXT, b"this page failed; see the role's log\n"


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
) -> BoundedServer | None:
    host, file = configuration.metrics.host, endpoint_file(folder, labels["name"])
    try:
        server = serve_pages(host, port, _pages(watch, labels, configuration.metrics.stalled_s))
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
    registry = CollectorRegistry()
    registry.register(MetricsCollector(watch, labels))

    def metrics(accept: str) -> PageResponse:
        encode, kind = choose_encoder(accept)
        return 200, kind, encode(registry)

    def health(accept: str) -> PageResponse:
        now = watch.health(stalled_s)
        body = {**labels, "state": now.state, "turn_age_s": round(now.turn_age_s, 3)}
        status = 503 if now.state == "stalled" else 200
        return status, "application/json", json.dumps(body).encode() + b"\n"

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
