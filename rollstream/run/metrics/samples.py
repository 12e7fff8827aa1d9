"""Converts values of metrics to the families and samples of Prometheus' encoder."""

from collections.abc import Mapping
from itertools import accumulate

from prometheus_client import Metric

from rollstream.metric_values import MetricHistogram, MetricValue
from rollstream.run.metrics.catalogue import PREFIX, Family


def to_metric(family: Family, value: MetricValue, labels: Mapping[str, str]) -> Metric:
    """All series have `labels`."""
    name = PREFIX + family.name
    metric = Metric(name.removesuffix("_total"), f"{family.unit}: {family.meaning}", family.kind)
    if not isinstance(value, Mapping):
        _add_samples(metric, name, value, labels)
        return metric
    for label, series_value in value.items():
        _add_samples(metric, name, series_value, {**labels, family.label: label})
    return metric


def _add_samples(
    metric: Metric, name: str, value: float | MetricHistogram, labels: Mapping[str, str]
) -> None:
    if isinstance(value, MetricHistogram):
        _add_buckets(metric, name, value, labels)
    else:
        metric.add_sample(name, dict(labels), float(value))


def _add_buckets(
    metric: Metric, name: str, histogram: MetricHistogram, labels: Mapping[str, str]
) -> None:
    numbers, total = histogram.state
    counts = list(accumulate(numbers))
    for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
        le = {**labels, "le": "+Inf" if bound == float("inf") else str(float(bound))}
        metric.add_sample(f"{name}_bucket", le, count)
    metric.add_sample(f"{name}_count", dict(labels), counts[-1])
    metric.add_sample(f"{name}_sum", dict(labels), total)


def with_labels(metric: Metric, labels: Mapping[str, str]) -> Metric:
    """A sample's own labels take precedence."""
    samples = metric.samples
    metric.samples = [s._replace(labels={**labels, **s.labels}) for s in samples]
    return metric
