"""`docs/reference/metrics.md` and the catalogue agree; `test_live_run.py` compares a run with
it.
"""

import threading

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram
from rollstream.run.metrics.catalogue import BY_ROLE, FAMILIES, PREFIX
from rollstream.run.metrics.endpoint import MetricsCollector, ProcessMetrics
from rollstream.run.role_catalogue import ROLES
from testbed.repository import ROOT

DOCUMENT = ROOT / "docs" / "reference" / "metrics.md"


def documented() -> list[tuple[str, ...]]:
    """The rows of the table."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [line[1:-1].split("|") for line in lines if line.startswith(f"| `{PREFIX}")]
    return [tuple(cell.strip() for cell in row) for row in rows]


def test_the_table_holds_every_family_and_nothing_else():
    wanted = [
        (
            f"`{PREFIX}{family.name}`",
            family.kind,
            family.unit,
            role,
            f"`{family.label}`" if family.label else "",
            family.meaning,
        )
        for role, families in BY_ROLE.items()
        for family in families
    ]
    assert documented() == wanted


def test_names_are_unique_and_those_of_counters_end_in_total():
    assert len(FAMILIES) == sum(map(len, BY_ROLE.values()))
    for family in FAMILIES.values():
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name


def test_seconds_and_bytes_are_in_the_name():
    for family in FAMILIES.values():
        assert (family.unit == "s") == ("seconds" in family.name), family.name
        assert (family.unit == "bytes") == ("bytes" in family.name), family.name


def test_the_whole_catalogue_is_valid_open_metrics():
    watch = ProcessMetrics(threading.Event())
    offered = [f for f in FAMILIES.values() if f.name != "scrape_errors_total"]
    values = {"histogram": MetricHistogram(SECONDS_BUCKETS), "counter": 1, "gauge": 1}
    plain = {f.name: values[f.kind] for f in offered}
    watch.offer(
        lambda: {f.name: {"a": plain[f.name]} if f.label else plain[f.name] for f in offered}
    )
    registry = CollectorRegistry()
    registry.register(MetricsCollector(watch, {"run": 'a "b"\n', "role": "r", "name": "n"}))
    parsed = text_string_to_metric_families(generate_latest(registry).decode())
    names = {family.name for family in parsed if family.name.startswith(PREFIX)}
    assert names == {PREFIX + name.removesuffix("_total") for name in FAMILIES}


def test_every_role_has_metrics():
    assert set(ROLES) == set(BY_ROLE) - {"every role", "supervisor"}
