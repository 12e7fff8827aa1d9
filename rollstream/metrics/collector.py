"""The observable state of one process (its metrics sources, its readers, and its loop's progress),
converted to Prometheus families at each scrape.

A role polls its stop event once per iteration of its loop. The event records the time of each poll,
so roles need no code for liveness and pay only for reading a clock.

A failing source loses only its own metrics: the error is logged once per source and kind, and
counted in `scrape_errors_total`. A metric without an entry in the catalogue is such an error.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeVar

from prometheus_client import Metric, ProcessCollector
from prometheus_client.registry import Collector

from rollstream.metric_values import MetricHistogram, MetricValue, MetricValues
from rollstream.metrics.catalogue import FAMILIES, PREFIX, Family
from rollstream.streams.reader import TopicReader

MetricsSource = Callable[[], MetricValues]
ReadersSource = Callable[[], Sequence[TopicReader]]


class TimedStopEvent(threading.Event):
    """The stop event of a role; records when it was last polled."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        super().__init__()
        self._stop, self._clock = stop, clock
        self.turned_s = clock()

    def is_set(self) -> bool:
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
    """`starting` until the role offers metrics (a standby stays so until it holds the lease);
    `stalled` if its loop has made no iteration for too long.
    """

    state: Literal["starting", "running", "stopping", "stalled"]
    turn_age_s: float


class ProcessMetrics:
    """One process: roles register sources, the endpoint reads them. Roles must use `stop`."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked = clock, stop
        self.stop = TimedStopEvent(stop, clock)
        self.sources: list[MetricsSource] = []
        self.beside: list[MetricsSource] = []
        """Sources of what the role uses, such as its log; they do not mark the role as running."""
        self.readers: list[ReadersSource] = []

    def offer(self, source: MetricsSource, readers: ReadersSource | None = None) -> None:
        """Add metrics and readers to what the endpoint serves."""
        self.sources.append(source)
        if readers is not None:
            self.readers.append(readers)

    def turn_age_s(self) -> float:
        """Returns the seconds since the last iteration of the role's loop."""
        return max(0.0, self._clock() - self.stop.turned_s)

    def health(self, stalled_s: float) -> LoopHealth:
        """Returns the state; `stalled` after `stalled_s` seconds without an iteration of
        the loop.
        """
        age = self.turn_age_s()
        if age > stalled_s:
            return LoopHealth("stalled", age)
        if self._asked.is_set():
            return LoopHealth("stopping", age)
        return LoopHealth("running" if self.sources else "starting", age)


log = logging.getLogger(__name__)

T = TypeVar("T")


class MetricsCollector(Collector):
    """Adds `labels` (run, role, name) to every series."""

    def __init__(self, watch: ProcessMetrics, labels: Mapping[str, str]) -> None:
        self._watch, self._labels = watch, dict(labels)
        self._process = ProcessCollector(registry=None)
        self._errors = 0
        self._logged: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        values: dict[str, MetricValue] = {
            "role_turn_age_seconds": self._watch.turn_age_s(),
            "interpreter_allocations": sys.getallocatedblocks(),
        }
        for source in [*self._watch.beside, *self._watch.sources]:
            values.update(self._read(source, {}))
        values.update(self._of_readers())
        for name, value in values.items():
            if name in FAMILIES:
                yield to_metric(FAMILIES[name], value, self._labels)
            else:
                self._record_error(f"metric {name!r} is not in rollstream/metrics/catalogue.py")
        for metric in self._read(self._process.collect, ()):
            yield _labelled(metric, self._labels)
        yield to_metric(FAMILIES["scrape_errors_total"], self._errors, self._labels)

    def _of_readers(self) -> dict[str, MetricValue]:
        """Metrics of the readers by topic; `behind` is that of the reader furthest behind."""
        behind: dict[str, float] = {}
        totals: dict[str, dict[str, float]] = {"dead": {}, "void": {}, "lost": {}}
        for read in list(self._watch.readers):
            for reader in self._read(read, ()):
                topic = reader.topic
                left = self._read(reader.behind, None)
                if left is not None:
                    behind[topic] = max(left, behind.get(topic, 0))
                for name, by_topic in totals.items():
                    by_topic[topic] = by_topic.get(topic, 0) + getattr(reader, name)
        by_name = {"behind_records": behind, **{f"{n}_total": one for n, one in totals.items()}}
        return {f"reader_{name}": values for name, values in by_name.items() if values}

    def _read(self, read: Callable[[], T], otherwise: T) -> T:
        """Returns a source's value, or `otherwise` if it raises: an error must not fail the
        scrape.
        """
        try:
            return read()
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


def to_metric(family: Family, value: MetricValue, labels: Mapping[str, str]) -> Metric:
    """Returns one family with its series."""
    name = PREFIX + family.name
    metric = Metric(name.removesuffix("_total"), f"{family.unit}: {family.meaning}", family.kind)
    if isinstance(value, MetricHistogram):
        _add_buckets(metric, name, value, labels)
    elif isinstance(value, Mapping):
        for label, number in value.items():
            metric.add_sample(name, {**labels, family.label: label}, float(number))
    else:
        metric.add_sample(name, dict(labels), float(value))
    return metric


def _add_buckets(
    metric: Metric, name: str, histogram: MetricHistogram, labels: Mapping[str, str]
) -> None:
    counts = list(accumulate(histogram.counts()))
    for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
        le = {**labels, "le": "+Inf" if bound == float("inf") else str(float(bound))}
        metric.add_sample(f"{name}_bucket", le, count)
    metric.add_sample(f"{name}_count", dict(labels), counts[-1])
    metric.add_sample(f"{name}_sum", dict(labels), histogram.sum)


def _labelled(metric: Metric, labels: Mapping[str, str]) -> Metric:
    samples = metric.samples
    metric.samples = [s._replace(labels={**labels, **s.labels}) for s in samples]
    return metric
