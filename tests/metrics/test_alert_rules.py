"""The rules of Prometheus, by its own tool: they are valid, each alert fires and ends with its
concern, and the queries of the service levels give what they promise.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.reference_pages import ALERTS
from testbed.repository import ROOT
from testbed.servers.prometheus import promtool

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
CONCERN_ALERTS = [one for one in RULES if "for" not in one and "alert" in one]
(UNOBSERVED,) = [one for one in RULES if "for" in one]
PAGE = (ROOT / "docs" / "how-to" / "monitor.md").read_text(encoding="utf-8")
OVERDUE, PAUSE, ARCHIVE = re.findall(r"^```promql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
OBSERVER = 'role="observe",name="observe"'


def check(tmp_path: Path, *tests: Mapping[str, Any]) -> None:
    file = tmp_path / "tests.yml"
    given = {"rule_files": [str(ALERTS)], "evaluation_interval": "15s", "tests": list(tests)}
    file.write_text(json.dumps(given))  # JSON is YAML
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def series(**values: str) -> list[dict[str, str]]:
    """Input series by name and labels, as promtool writes their values."""
    return [{"series": name, "values": text} for name, text in values.items()]


def test_the_rules_and_the_configuration_are_valid() -> None:
    done = promtool("check", "rules", str(ALERTS))
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout
    done = promtool("check", "config", str(ROOT / "deploy" / "prometheus.yml"))
    assert done.returncode == 0, done.stderr


def fires(alert: Mapping[str, Any], at: str, runs: Sequence[str]) -> dict[str, Any]:
    """The expectation that this alert fires at that time for these runs, with its annotations."""
    return {
        "eval_time": at,
        "alertname": alert["alert"],
        "exp_alerts": [
            {
                "exp_labels": {**alert["labels"], "run": run},
                "exp_annotations": {
                    name: text.replace("{{ $labels.run }}", run)
                    for name, text in alert["annotations"].items()
                },
            }
            for run in runs
        ],
    }


def test_each_alert_fires_and_ends_with_its_concern_and_names_its_run(tmp_path: Path) -> None:
    tests: list[dict[str, Any]] = []
    for alert in CONCERN_ALERTS:
        name = alert["labels"]["concern"]
        raised = f'rollstream_concern{{run="a",role="observe",name="{name}"}}'
        calm = f'rollstream_concern{{run="b",role="observe",name="{name}"}}'
        times = [("15s", []), ("30s", ["a"]), ("45s", ["a"]), ("60s", [])]
        tests.append(
            {
                "interval": "15s",
                "input_series": series(**{raised: "0 0 1 1 0 0", calm: "0x6"}),
                "alert_rule_test": [fires(alert, at, runs) for at, runs in times],
            }
        )
    check(tmp_path, *tests)


def test_a_run_that_nothing_observes_raises_its_own_alert(tmp_path: Path) -> None:
    role = 'rollstream_role_turn_age_seconds{{run="{}",role="train",name="trainer"}}'
    given = {
        role.format("a"): "1x20",
        role.format("b"): "1x20",
        'rollstream_concern{run="b",role="supervisor",name="step_overdue"}': "0x20",
    }
    check(
        tmp_path,
        {
            "interval": "15s",
            "input_series": series(**given),
            "alert_rule_test": [
                fires(UNOBSERVED, "45s", []),
                fires(UNOBSERVED, "90s", ["a"]),
            ],
        },
    )


def measured(query: str, at: str, found: Mapping[str, float]) -> dict[str, Any]:
    """The expectation that the query gives these values by run."""
    samples = [{"labels": f'{{run="{run}"}}', "value": value} for run, value in found.items()]
    return {"expr": query, "eval_time": at, "exp_samples": samples}


def test_the_level_of_steps_counts_hours_with_a_quarter_of_an_hour_without_one(
    tmp_path: Path,
) -> None:
    """Of 10 hours (0 to 9) one has a step overdue for 20 minutes; 10 minutes do not count."""
    overdue = f'rollstream_concern{{run="a",{OBSERVER}}}'.replace('"observe"}', '"step_overdue"}')
    values = "0x89 1x19 0x300 1x9 0x200"
    check(
        tmp_path,
        {
            "interval": "1m",
            "input_series": series(**{overdue: values}),
            "promql_expr_test": [measured(f"round({OVERDUE}, 0.001)", "9h", {"a": 0.9})],
        },
    )


@pytest.mark.parametrize(("restarts", "found"), [("0x9 1x20", {"a": 40}), ("0x9 2x20", {})])
def test_the_level_of_deaths_is_the_longest_pause_without_the_start(
    tmp_path: Path, restarts: str, found: Mapping[str, float]
) -> None:
    trainer = 'run="a",role="train",name="trainer"'
    given = {
        f'rollstream_run_step_age_seconds{{run="a",{OBSERVER}}}': "2x9 20 45 2x20",
        f'rollstream_run_restarts_total{{run="a",{OBSERVER}}}': restarts,
        f"rollstream_role_running_since_seconds{{{trainer}}}": "1005x30",
        f'process_start_time_seconds{{job="rollstream",{trainer}}}': "1000x30",
    }
    check(
        tmp_path,
        {
            "interval": "1m",
            "input_series": series(**given),
            "promql_expr_test": [measured(PAUSE, "15m", found)],
        },
    )


def test_the_level_of_the_archive_is_in_multiples_of_its_setting(tmp_path: Path) -> None:
    given = {
        f'rollstream_run_archive_age_seconds{{run="a",{OBSERVER}}}': "0x9 30 750 60x9",
        f'rollstream_run_archive_roll_seconds{{run="a",{OBSERVER}}}': "300x20",
    }
    check(
        tmp_path,
        {
            "interval": "1m",
            "input_series": series(**given),
            "promql_expr_test": [measured(ARCHIVE, "20m", {"a": 2.5})],
        },
    )
