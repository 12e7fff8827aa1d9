"""A plugin of pytest that prints what each file of tests costs in seconds of CPU, in this process
and in those that it started, living or ended. Other programs of the machine change it little.

    python -m pytest -p testbed.cost_report tests/audit

`COST_REPORT=FILE` keeps the cost of every test as JSON lines, too. With pytest-xdist each worker
measures itself. A server that a fixture starts is counted with the test that is running.
"""

import json
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

FILES, TESTS = 20, 20
"""Lines that are printed of each kind."""
_PROPERTY = "cpu_s"
_before = 0.0
_collected: list[float] = []
_costs: dict[str, float] = defaultdict(float)


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of all that it started so far, but not of those
    whose parents ended without waiting for them.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it ended; its parent has its time at the next look
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def pytest_collection_finish(session: pytest.Session) -> None:
    global _before
    _before = cpu_s()
    _collected.append(_before)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["collection_cpu_s"] = _before  # pyright: ignore


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Counts a test and its fixtures at its end, and what a look costs with nobody."""
    global _before
    outcome = yield
    if call.when == "teardown":
        report = outcome.get_result()
        report.user_properties = [*report.user_properties, (_PROPERTY, cpu_s() - _before)]
        _before = cpu_s()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the costs, in the process that prints them."""
    for name, amount in report.user_properties:
        if name == _PROPERTY and isinstance(amount, float):
            _costs[report.nodeid] += amount


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes what a worker's collection cost."""
    _collected.append(getattr(node, "workeroutput", {}).get("collection_cpu_s", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the sums, and keeps all of them where `COST_REPORT` names a file."""
    files: dict[str, float] = defaultdict(float)
    for test, amount in _costs.items():
        files[test.partition("::")[0]] += amount
    terminalreporter.section("CPU seconds, with child processes")
    line = terminalreporter.line
    before = ", ".join(f"{amount:.1f}" for amount in _collected if amount)
    line(f"{sum(files.values()):8.1f}  all {len(_costs)} tests")
    line(f"{before:>8}  imports and collection, for each process of pytest")
    for costs, count in ((files, FILES), (_costs, TESTS)):
        line("")
        for name, amount in sorted(costs.items(), key=lambda item: -item[1])[:count]:
            line(f"{amount:8.1f}  {name}")
    if file := os.environ.get("COST_REPORT"):
        rows = ({"test": test, _PROPERTY: round(_costs[test], 3)} for test in sorted(_costs))
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
