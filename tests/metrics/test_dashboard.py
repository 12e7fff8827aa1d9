"""The dashboards select known metrics only, the page of a run those of the chosen run."""

import json
import re
import threading

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollstream.run.metrics.catalogue import FAMILIES, PREFIX
from rollstream.run.metrics.endpoint import MetricsCollector, ProcessMetrics
from testbed.oncall.dashboards import FLEET_PAGE, FOLDER, RUN_PAGE, panel_queries

DASHBOARD = json.loads((FOLDER / RUN_PAGE).read_text())
METRIC = re.compile(r"\b((?:rollstream|process)_[a-z_]+)(\{[^}]*\})?")
PROCESS = {"process_resident_memory_bytes"}


def series() -> set[str]:
    """The series that a role can serve, under the names that Prometheus stores."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    names = {
        PREFIX + family.name + suffix
        for family in FAMILIES.values()
        for suffix in suffixes.get(family.kind, ("",))
    }
    return names | PROCESS


@pytest.mark.parametrize(("panel", "query"), list(panel_queries(RUN_PAGE)))
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


@pytest.mark.parametrize(("panel", "query"), list(panel_queries(FLEET_PAGE)))
def test_every_panel_of_the_fleet_shows_all_runs(panel, query):
    names = {name for name, _ in METRIC.findall(query)}
    assert names
    assert names <= series(), panel
    assert "$run" not in query
    assert "by (run" in query or "by (name)" in query


def test_every_series_carries_its_run():
    watch = ProcessMetrics(threading.Event())
    watch.offer(lambda: {"trainer_step": 3, "trainer_last": {"loss": 0.5}})
    registry = CollectorRegistry()
    registry.register(MetricsCollector(watch, {"run": "a", "role": "train", "name": "trainer"}))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) > 8
    assert {sample.labels.get("run") for sample in samples} == {"a"}
