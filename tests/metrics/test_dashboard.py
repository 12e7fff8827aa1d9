"""The dashboard and the alerts of the documentation: known metrics only, of one run each."""

import json
import re
import threading

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollstream.metrics.catalogue import FAMILIES, PREFIX
from rollstream.metrics.endpoint import MetricsCollector, ProcessMetrics
from testbed.repository import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/rollstream.json").read_text())
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]
METRIC = re.compile(r"\b((?:rollstream|process)_[a-z_]+)(\{[^}]*\})?")
PROCESS = {"process_resident_memory_bytes"}


def alerts() -> list[str]:
    text = (ROOT / "docs/how-to/monitor.md").read_text()
    (block,) = re.findall(r"Useful alerts.*?```\n(.*?)```", text, re.DOTALL)
    return block.splitlines()


def series() -> set[str]:
    """The series that a role can serve, under the names that Prometheus stores."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    names = {
        PREFIX + family.name + suffix
        for family in FAMILIES.values()
        for suffix in suffixes.get(family.kind, ("",))
    }
    return names | PROCESS


@pytest.mark.parametrize(("panel", "query"), QUERIES)
def test_every_panel_selects_series_that_exist_of_the_chosen_run(panel, query):
    found = METRIC.findall(query)
    assert found
    for name, selector in found:
        assert name in series(), panel
        assert 'run="$run"' in selector, panel


def test_the_run_is_chosen_from_the_runs_that_are_scraped():
    (variable,) = DASHBOARD["templating"]["list"]
    assert variable["name"] == "run"
    assert (
        variable["query"]["query"]
        == variable["definition"]
        == "label_values(rollstream_role_turn_age_seconds, run)"
    )


@pytest.mark.parametrize("query", alerts())
def test_every_alert_is_of_known_series_and_names_its_run(query):
    names = {name for name, _ in METRIC.findall(query)}
    assert names
    assert names <= series()
    assert "by (run" in query


def test_every_series_carries_its_run():
    watch = ProcessMetrics(threading.Event())
    watch.offer(lambda: {"trainer_step": 3, "trainer_last": {"loss": 0.5}})
    registry = CollectorRegistry()
    registry.register(MetricsCollector(watch, {"run": "a", "role": "train", "name": "trainer"}))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) > 8
    assert {sample.labels.get("run") for sample in samples} == {"a"}
