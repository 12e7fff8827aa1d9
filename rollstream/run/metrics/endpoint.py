"""Serves one process's metrics (`/metrics` for Prometheus) and health (`/healthz`). No error here
ends a role.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollstream.foreign_json import parse_json
from rollstream.http_guard import program_rule
from rollstream.http_server import BoundedServer, HttpResponder
from rollstream.metric_values import MetricValue, MetricValues
from rollstream.os_failures import explain_os_error
from rollstream.revision import code_revision
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import METRICS_PORT
from rollstream.run.metrics.catalogue import FAMILIES
from rollstream.run.metrics.samples import to_metric, with_labels
from rollstream.streams.foreign_text import PORT_MAX, whole_number
from rollstream.streams.reader import TopicReader
from rollstream.streams.release import RELEASE

MetricsSource = Callable[[], MetricValues]
"""By names in `catalogue.py`; called by the server's threads."""
ReadersSource = Callable[[], Sequence[TopicReader]]
"""Their lag and counts are served."""


class TimedStopEvent(threading.Event):
    """A role's stop event; `turned_s` is the time on `clock` at which the role last polled it."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        super().__init__()
        self._stop, self._clock = stop, clock
        self.turned_s = clock()

    def is_set(self) -> bool:
        # A role polls its stop event once per iteration of its loop, so it needs no other code to
        # show progress.
        self.turned_s = self._clock()
        return self._stop.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.turned_s = self._clock()
        is_stopped = self._stop.wait(timeout)
        self.turned_s = self._clock()
        return is_stopped

    def set(self) -> None:
        self._stop.set()

    def clear(self) -> None:
        self._stop.clear()


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """`starting` until the role offers metrics (a standby until it holds the lease), `stopping`
    after a request to stop, `stalled` in any phase after too long without an iteration.
    `turn_age_s` is the time since the last one, in seconds.
    """

    state: Literal["starting", "running", "stopping", "stalled"]
    turn_age_s: float


class ProcessMetrics:
    """A role registers its sources here. Its loop must poll `stop`: the health follows from these
    polls.
    """

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked = clock, stop
        self.stop = TimedStopEvent(stop, clock)
        self.sources: list[MetricsSource] = []
        self.dependencies: list[MetricsSource] = []
        """Parts that the role uses, such as its log; they do not mark it as running."""
        self.readers: list[ReadersSource] = []
        self.offered_s = 0.0
        """0 before the first call of `offer`, in Unix time."""

    def offer(self, source: MetricsSource, readers: ReadersSource | None = None) -> None:
        """The role then counts as running."""
        self.offered_s = time.time()
        self.sources.append(source)
        if readers is not None:
            self.readers.append(readers)

    def turn_by(self, stop: threading.Event) -> TimedStopEvent:
        """Returns the event polled by the role's loop from now on, in place of its process's stop
        event; it is set when `stop` is.
        """
        self.stop = TimedStopEvent(stop, self._clock)
        return self.stop

    def turn_age_s(self) -> float:
        return max(0.0, self._clock() - self.stop.turned_s)

    def health(self, stalled_s: float) -> LoopHealth:
        """`stalled` after `stalled_s` seconds without an iteration."""
        age = self.turn_age_s()
        if age > stalled_s:
            return LoopHealth("stalled", age)
        if self._asked.is_set():
            return LoopHealth("stopping", age)
        return LoopHealth("running" if self.sources else "starting", age)


log = logging.getLogger(__name__)

T = TypeVar("T")
LAG_S = 1.0  # that a scrape waits for the ends of topics; Prometheus itself waits ten seconds


class MetricsCollector(Collector):
    """Reads all sources at each scrape, and adds `labels` to every series. A failing source, or a
    metric without an entry in the catalogue, loses only its own metrics, and is counted in
    `scrape_errors_total`.
    """

    def __init__(self, watch: ProcessMetrics, labels: Mapping[str, str]) -> None:
        self._watch, self._labels = watch, dict(labels)
        self._process = ProcessCollector(registry=None)
        self._errors = 0
        self._logged: set[str] = set()
        self._asking: threading.Thread | None = None
        self._behind: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        values: dict[str, MetricValue] = {
            "build_info": {RELEASE: 1},
            "role_running_since_seconds": self._watch.offered_s,
            "role_turn_age_seconds": self._watch.turn_age_s(),
            "interpreter_allocations": sys.getallocatedblocks(),
        }
        for source in [*self._watch.dependencies, *self._watch.sources]:
            values.update(self._read(source, {}))
        values.update(self._of_readers())
        for name, value in values.items():
            if name in FAMILIES:
                more = {"revision": self._revision} if name == "build_info" else {}
                yield to_metric(FAMILIES[name], value, {**self._labels, **more})
            else:
                self._record_error(f"metric {name!r} is not in rollstream/run/metrics/catalogue.py")
        for metric in self._read(self._process.collect, ()):
            yield with_labels(metric, self._labels)
        yield to_metric(FAMILIES["scrape_errors_total"], self._errors, self._labels)

    @cached_property
    def _revision(self) -> str:
        # At a scrape: git takes a tenth of a second.
        return code_revision()

    def _of_readers(self) -> dict[str, MetricValue]:
        """Of several readers of a topic, `behind_records` is the largest lag; other metrics are
        sums.
        """
        totals: dict[str, dict[str, float]] = {"dead": {}, "void": {}, "lost": {}}
        readers = [reader for read in list(self._watch.readers) for reader in self._read(read, ())]
        for reader in readers:
            for name, by_topic in totals.items():
                by_topic[reader.topic] = by_topic.get(reader.topic, 0) + getattr(reader, name)
        by_name = {f"{n}_total": sums for n, sums in totals.items()}
        by_name["behind_records"] = self._lag_of(readers)
        return {f"reader_{name}": values for name, values in by_name.items() if values}

    def _lag_of(self, readers: Sequence[TopicReader]) -> dict[str, float]:
        """Returns the lag by topic; {} if the brokers do not answer within `LAG_S`."""

        def ask() -> None:
            lags: dict[str, float] = {}
            for reader in readers:
                lag = self._read(reader.behind, None)
                if lag is not None:
                    lags[reader.topic] = max(lag, lags.get(reader.topic, 0))
            self._behind = lags

        asking = self._asking
        if asking is None or not asking.is_alive():
            self._behind = {}
            # Brokers may take a minute to fail, in which the other metrics are needed most: one
            # thread at a time asks them.
            asking = threading.Thread(target=ask, name="metrics-lag", daemon=True)
            self._asking = asking
            asking.start()
        asking.join(LAG_S)
        return {} if asking.is_alive() else self._behind

    def _read(self, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        # The error of one source must not fail the scrape.
        except Exception as error:  # noqa: BLE001
            self._record_error(
                f"{getattr(read, '__qualname__', read)}: {type(error).__name__}: {error}"
            )
            return otherwise

    def _record_error(self, trouble: str) -> None:
        self._errors += 1
        kind = trouble[:60]
        if kind not in self._logged and len(self._logged) < 100:
            self._logged.add(kind)
            log.warning("metrics: %s; these metrics are missing from the scrape", trouble)


REQUESTS_MAX = 8  # served at the same time
CLIENT_S = 5.0  # longest read or write of a client


PageResponse = tuple[int, str, bytes]
"""Status, content type and body."""
PageHandler = Callable[[str], PageResponse]
"""Request's `Accept` header → response."""
TEXT = "text/plain; charset=utf-8"


def serve_pages(host: str, port: int, pages: Mapping[str, PageHandler]) -> BoundedServer:
    """Serves the pages until `end` of the returned server. Raises `OSError` if the address is
    unavailable.
    """

    class Responder(HttpResponder):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            path, accept = self.path.partition("?")[0], self.headers.get("Accept", "")
            with suppress(ConnectionError):
                self.content(*_answer(pages, path, accept))

        do_HEAD = do_GET

    return BoundedServer((host, port), Responder, "metrics", REQUESTS_MAX, program_rule(host))


def _answer(pages: Mapping[str, PageHandler], path: str, accept: str) -> PageResponse:
    page = pages.get(path)
    if page is None:
        paths = ", ".join(sorted(pages))
        return 404, TEXT, f"served here: {paths}\n".encode()
    try:
        return page(accept)
    except Exception:
        log.exception("metrics: %s failed", path)
        return 500, TEXT, b"this page failed; see the role's log\n"


def endpoint_file(folder: Path, name: str) -> Path:
    """Returns the endpoint file with the endpoint's address. A clean end removes it; after `kill
    -9` it stays until the next start under that name.
    """
    return RunFolder(folder).metrics / "endpoints" / f"{quote(name, safe='')}.json"


def metrics_port(configuration: Configuration, environment: Mapping[str, str]) -> int:
    """`ROLLSTREAM_METRICS_PORT`, which supervisor and compose set, else the setting `metrics.port`;
    0 means any free port.
    """
    text = environment.get(METRICS_PORT, "")
    if not text:
        return configuration.metrics.port
    port = whole_number(text)
    if port is None or port > PORT_MAX:
        log.warning("%s=%.40r is not a port; using metrics.port", METRICS_PORT, text)
        return configuration.metrics.port
    return port


@contextmanager
def serve_metrics(
    configuration: Configuration,
    folder: Path,
    role: str,
    name: str,
    watch: ProcessMetrics,
    environment: Mapping[str, str] = os.environ,
) -> Generator[None]:
    """Serves while the block runs, unless `metrics.enabled` is off."""
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
        log.warning("metrics: %s cannot be written: %s", file, explain_os_error(error))
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
    try:
        # A successor of the same name may have replaced it.
        if parse_json(file.read_bytes(), dict[str, Any]).get("pid") == os.getpid():
            file.unlink()
    except (OSError, ValueError):
        log.debug("metrics: %s is already gone", file)
