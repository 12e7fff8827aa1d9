"""A real Prometheus scrapes a living local run: every panel of both dashboards has data, no alert
fires, and the alert of a planted fault does.
"""

import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.run.metrics.endpoint import endpoint_file
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import StepDone
from testbed.oncall.dashboards import FLEET_PAGE, RUN_PAGE, panel_queries
from testbed.oncall.watched_run import LIMIT_S, measure_alerts
from testbed.reference_pages import ALERTS
from testbed.scraping import endpoint
from testbed.servers.prometheus import Prometheus
from testbed.waiting import wait_for
from tests.metrics.live_run import records, started

NAMES = ("supervisor", "prompts", "dispatch", "trainer", "rollout-0", "eval", "archive")
pytestmark = pytest.mark.long


def without_data(server: Prometheus) -> Iterator[str]:
    for page in (RUN_PAGE, FLEET_PAGE):
        for panel, query in panel_queries(page):
            found = server.query(query.replace("$run", "tiny"))
            if not any(math.isfinite(value) for _, value in found):
                yield f"{page}, {panel}: {query}"


def test_every_panel_has_data_of_a_living_run_and_no_alert_fires(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "run"
    more = ("trainer.steps=5000", "archive.enabled=true", "archive.roll_s=2")
    with started(folder, model, *more) as run:
        run.wait_for(lambda: all(endpoint_file(folder, name).exists() for name in NAMES))
        run.wait_for(lambda: len(records(folder, "ledger", StepDone)) >= 6)
        run.wait_for(lambda: bool(read_metrics(folder / "metrics" / "eval.jsonl")))
        served = [endpoint(folder, name) for name in NAMES]
        targets = [f"{one['host']}:{one['port']}" for one in served]
        with Prometheus(targets, ALERTS, scrape_s=2) as server:
            missing = lambda: "\n".join(without_data(server))  # noqa: E731
            wait_for(lambda: not missing(), run.newest().process, missing)
            assert not [one for one in server.firing() if one[0].endswith(("Dying", "Unobserved"))]
        run.newest().stop(signal.SIGINT)


def test_each_planted_fault_raises_its_alert_within_two_evaluations(tmp_path: Path) -> None:
    delays = measure_alerts(tmp_path)
    assert {name: one for name, one in delays.items() if one is None or one > LIMIT_S} == {}
