"""Converts the metrics of a process to Prometheus families at each scrape.

A failing source loses only its own metrics: the error is logged once per source and kind, and
counted in `scrape_errors_total`. A metric without an entry in the catalogue is such an error.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TypeVar

from prometheus_client import Metric, ProcessCollector
from prometheus_client.registry import Collector

from rollstream.metric_values import MetricHistogram, MetricValue
from rollstream.metrics.catalogue import FAMILIES, PREFIX, Family
from rollstream.metrics.process import ProcessMetrics

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
        dead: dict[str, float] = {}
        void: dict[str, float] = {}
        lost: dict[str, float] = {}
        for read in list(self._watch.readers):
            for reader in self._read(read, ()):
                topic = reader.topic
                left = self._read(reader.behind, None)
                if left is not None:
                    behind[topic] = max(left, behind.get(topic, 0))
                dead[topic] = dead.get(topic, 0) + reader.dead
                void[topic] = void.get(topic, 0) + reader.void
                lost[topic] = lost.get(topic, 0) + reader.lost
        by_name = {
            "behind_records": behind,
            "dead_total": dead,
            "void_total": void,
            "lost_total": lost,
        }
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
