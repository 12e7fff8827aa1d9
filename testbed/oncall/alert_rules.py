"""Writes `deploy/alerts.yml`, the rules of Prometheus: one alert for each concern of
`rollstream/look/monitor/concerns.py`, one for a run that nothing observes, and the recording rules
that measure the service levels of `docs/how-to/monitor.md`.

`python -m testbed.reference_pages` rewrites the file; `tests/metrics/test_concerns.py` fails while
it is stale.
"""

from collections.abc import Iterator

from rollstream.look.monitor.concerns import CONCERNS, Concern
from rollstream.run.metrics.catalogue import PREFIX

RUNBOOK = "docs/reference/runbook-concerns.md"
EVALUATION_S = 15
"""Seconds between two evaluations of the rules. An alert has no `for`: the checks of the concerns
wait for as long as each of them needs.
"""
UNOBSERVED = "unobserved"
"""The one alert that is no concern: who observes no run can raise none."""
HEAD = """\
# Alerts and service levels. Generated from rollstream/look/monitor/concerns.py by
# `python -m testbed.reference_pages`; docs/reference/runbook-concerns.md has an entry for each.
groups:
  - name: rollstream-concerns
    interval: {interval}s
    rules:"""
UNOBSERVED_RULE = """\
      - alert: RollstreamUnobserved
        expr: |-
          group by (run) (rollstream_role_turn_age_seconds)
            unless on (run) group by (run) (rollstream_concern)
        for: 1m
        labels: {severity: page, concern: unobserved}
        annotations:
          summary: "{{ $labels.run }}: roles are scraped, and no process observes the run"
          runbook: docs/reference/runbook-concerns.md#unobserved"""
LEVELS = """\
  - name: rollstream-levels
    interval: 1m
    rules:
      - record: run:rollstream_step_overdue:min15m
        expr: min_over_time((max by (run) (rollstream_concern{name="step_overdue"}))[15m:1m])
      - record: run:rollstream_step_age_seconds:max10m
        expr: max by (run) (max_over_time(rollstream_run_step_age_seconds[10m]))
      - record: run:rollstream_restarts:increase10m
        expr: max by (run) (increase(rollstream_run_restarts_total[10m]))
      - record: run:rollstream_start_seconds:max
        expr: |-
          max by (run) (
            (rollstream_role_running_since_seconds > 0)
            - on (run, role, name) process_start_time_seconds{job="rollstream"})
      - record: run:rollstream_archive_rolls:max
        expr: |-
          max by (run) (rollstream_run_archive_age_seconds)
            / max by (run) (rollstream_run_archive_roll_seconds)"""


def alert_name(concern: str) -> str:
    """Returns the name of a concern's alert: `step_overdue` → `RollstreamStepOverdue`."""
    return "Rollstream" + "".join(word.capitalize() for word in concern.split("_"))


def rule_lines() -> Iterator[str]:
    """Yields the lines of the file."""
    yield HEAD.format(interval=EVALUATION_S)
    for concern in CONCERNS:
        yield from _alert(concern)
    yield UNOBSERVED_RULE
    yield LEVELS


def _alert(concern: Concern) -> Iterator[str]:
    name = concern.name
    yield f"      - alert: {alert_name(name)}"
    yield f'        expr: max by (run) ({PREFIX}concern{{name="{name}"}}) > 0'
    yield f"        labels: {{severity: {concern.severity}, concern: {name}}}"
    yield "        annotations:"
    yield f'          summary: "{{{{ $labels.run }}}}: {concern.meaning}"'
    yield f"          runbook: {RUNBOOK}#{name}"
