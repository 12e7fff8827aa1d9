"""The four faces of each concern agree, and a fault in a real log raises each concern."""

import re
import threading
from pathlib import Path

import pytest
import yaml

from rollstream.look.monitor.concerns import CONCERNS, concern_of
from rollstream.run.metrics.endpoint import ProcessMetrics, serve_metrics
from testbed.oncall.alert_rules import RUNBOOK, UNOBSERVED, alert_name
from testbed.oncall.faults import FAULTS, plant, prepare
from testbed.oncall.planted_run import copy_of, write_healthy_run
from testbed.reference_pages import ALERTS, alerts_text
from testbed.repository import ROOT
from testbed.scraping import endpoint, scrape

ENTRY = re.compile(
    r"^## (\w+)\n\n\*\*(page|ticket)\.\*\* (.*?)\n\n```\n(.*?)```\n\n(.*?)\n\n"
    r"\*\*How it ends\.\*\* (.*?)(?=\n\n## |\n*\Z)",
    re.MULTILINE | re.DOTALL,
)
NAMES = [concern.name for concern in CONCERNS]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "healthy"
    write_healthy_run(folder)
    return folder


def served(url: str) -> dict[str, float]:
    """The concerns of the metric, by name."""
    return {labels["name"]: value for labels, value in scrape(url)["rollstream_concern"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_raises_its_concern_and_no_other(
    name: str, healthy: Path, tmp_path: Path
) -> None:
    run, watch = copy_of(healthy, tmp_path / "run"), ProcessMetrics(threading.Event())
    prepare(run, FAULTS[name])
    observer = run.observer()
    watch.offer(observer.metric_values)
    with serve_metrics(run.configuration, run.folder.path, "observe", "observe", watch, {}):
        url = endpoint(run.folder.path, "observe")["url"]
        assert "rollstream_concern" not in scrape(url)  # nothing was read yet
        assert observer.observe(catch_up_s=60.0).concerns == ()
        assert served(url) == dict.fromkeys(NAMES, 0.0)
        plant(run, FAULTS[name])
        (warning,) = observer.observe(catch_up_s=60.0).concerns
        assert concern_of(warning) == name
        assert served(url) == {**dict.fromkeys(NAMES, 0.0), name: 1.0}
    run.close()


def test_each_concern_has_a_fault() -> None:
    assert list(FAULTS) == NAMES


def test_the_alerts_are_those_of_the_list() -> None:
    """If this fails: `python -m testbed.reference_pages`, then commit the file."""
    assert ALERTS.read_text(encoding="utf-8") == alerts_text()
    groups = {one["name"]: one["rules"] for one in yaml.safe_load(alerts_text())["groups"]}
    *rules, unobserved = groups["rollstream-concerns"]
    for concern, rule in zip(CONCERNS, rules, strict=True):
        assert rule["alert"] == alert_name(concern.name)
        assert f'rollstream_concern{{name="{concern.name}"}}' in rule["expr"]
        assert rule["labels"] == {"severity": concern.severity, "concern": concern.name}
        assert rule["annotations"]["summary"].endswith(concern.meaning)
        assert rule["annotations"]["runbook"] == f"{RUNBOOK}#{concern.name}"
    assert unobserved["labels"]["concern"] == UNOBSERVED


def test_the_runbook_has_an_entry_for_each_alert_in_their_order() -> None:
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    entries = ENTRY.findall(text)
    assert [name for name, *_ in entries] == [*NAMES, UNOBSERVED]
    assert len(entries) == text.count("\n## ")
    for concern, (_, severity, meaning, commands, _, _) in zip(CONCERNS, entries, strict=False):
        given = " ".join(meaning.split())
        assert severity == concern.severity
        assert given == f"{concern.meaning[0].upper()}{concern.meaning[1:]}."
        assert len(commands.splitlines()) == 3
        assert all(line.startswith("rollstream ") for line in commands.splitlines())


def test_the_meanings_are_sentences_without_their_end() -> None:
    for concern in CONCERNS:
        assert concern.meaning[0].islower()
        assert not concern.meaning.endswith(".")
        assert '"' not in concern.meaning  # it stands in quotes in the alert's rule
    assert len(set(NAMES)) == len(NAMES)
