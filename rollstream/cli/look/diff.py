"""`rollstream diff A B`: compares two runs by their settings, the endings of their groups, the
curves of their metrics, and the state hashes of their steps. Curves and hashes are compared over
the steps that both runs have. The runs are only read; `compare_runs` computes the comparison, and
this file prints it.
"""

import argparse
import json
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollstream.cli.arguments import CommandParser
from rollstream.config.run_folder import run_folder
from rollstream.monitor.format import sparkline
from rollstream.report.comparison import RunComparison, compare_runs
from rollstream.report.summary import distinct_names, open_history


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 runs/quickstart-1", "runs/quickstart-0 runs/quickstart-1 --json"
    )
    command.add_named_run("first", "A", "the first run")
    command.add_named_run("second", "B", "the second run")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Print the comparison. The exit code is 0 whether the runs differ or not; if an argument is
    not a run, `ConfigurationError` is raised (exit code 2).
    """
    folders = run_folder(arguments.first), run_folder(arguments.second)
    first, second = distinct_names(folders)
    found = compare_runs((first, second), open_history(folders[0]), open_history(folders[1]))
    if arguments.json:
        print(json.dumps(found.line()))
    else:
        Console().print(render(found))
    return 0


def render(found: RunComparison) -> RenderableType:
    """Returns the comparison for terminals of at least 80 columns: settings that differ, groups by
    ending, curves, and the first step at which the states differ.
    """
    return Group(_settings(found), Text(), _outcomes(found), Text(), _curves(found), _states(found))


def _settings(found: RunComparison) -> RenderableType:
    if not found.settings:
        return Text("settings: the same")
    table = _table("settings that differ", "setting", *found.runs)
    for setting in found.settings:
        table.add_row(setting.key, _shown(setting.first), _shown(setting.second))
    return table


def _outcomes(found: RunComparison) -> RenderableType:
    table = _table("groups", "ending", *found.runs)
    first, second = found.outcomes
    for name in first:
        table.add_row(name, str(first[name]), str(second.get(name, 0)))
    return table


def _curves(found: RunComparison) -> RenderableType:
    if not found.curves:
        return Text("curves: no step is in both runs")
    table = _table("curves: mean of the last fifth", "figure", *found.runs, "change", "course")
    for curve in found.curves:
        a, b = curve.last
        course = f"{sparkline(curve.first, 8)} {sparkline(curve.second, 8)}".strip()
        table.add_row(curve.name, f"{a:.4g}", f"{b:.4g}", _change(a, b), course)
    return table


def _states(found: RunComparison) -> RenderableType:
    steps = f"{found.states_compared} common steps"
    if not found.states_compared:
        return Text("states: no common step")
    if found.states_apart is None:
        return Text(f"states: identical at all {steps}")
    return Text(f"states: of {steps}, the first that differs is step {found.states_apart}")


def _change(a: float, b: float) -> str:
    return f"{(b - a) / abs(a):+.1%}" if a else f"{b - a:+.3g}"


def _shown(value: Any) -> str:
    return "–" if value is None else json.dumps(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, style="dim" if number == 0 else "", overflow="fold")
    return table
