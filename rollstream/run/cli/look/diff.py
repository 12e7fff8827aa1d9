"""`rollstream diff A B`: compares two runs by settings, endings of groups, curves, state hashes of
common steps, common prompts in pairs with intervals (`analysis/paired_runs.py`), and fits of the
reward.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollstream.errors import ConfigurationError
from rollstream.look.monitor.format import sparkline
from rollstream.look.query.intervals import CONFIDENCE
from rollstream.look.query.locate import RunLocation, locate_run
from rollstream.look.query.output import json_value
from rollstream.look.query.paired_runs import PairedFigure, RunFigures, paired_figures, read_figures
from rollstream.look.query.session import QuerySession
from rollstream.look.report.comparison import RunComparison, compare_runs
from rollstream.look.report.learning import FIT_HEAD, RewardFit, reward_fits
from rollstream.look.report.summary import distinct_names, open_history
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.config.run_folder import RunFolder, run_folder
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import warn


@dataclass(frozen=True, slots=True)
class RunDifference:
    """The run difference of the histories, paired figures, and fits of each run's reward curves."""

    compared: RunComparison
    paired: tuple[PairedFigure, ...]
    fits: tuple[Sequence[RewardFit], Sequence[RewardFit]]

    def line(self) -> dict[str, Any]:
        """Infinities and NaN are null."""
        return self.compared.line() | {
            "paired": [json_value(figure.line()) for figure in self.paired],
            "fits": [[json_value(fit.line()) for fit in fits] for fits in self.fits],
        }


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 runs/quickstart-1",
        "runs/quickstart-0 runs/quickstart-1 --margin 0.02",
        "runs/quickstart-0 runs/quickstart-1 --json",
    )
    command.add_named_run("first", "A", "the first run")
    command.add_named_run("second", "B", "the second run")
    command.add_argument(
        "--margin",
        metavar="REWARD",
        type=float,
        help="test that rewards differ by less than this (two one-sided tests at level 0.05)",
    )
    command.add_argument(
        "--confidence",
        metavar="SHARE",
        type=float,
        default=CONFIDENCE,
        help="confidence of the intervals (default 0.95)",
    )
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Returns 0 whether the runs differ or not."""
    if not 0.5 <= arguments.confidence < 1:
        raise ConfigurationError(f"--confidence must be .5 to 1, got {arguments.confidence:g}")
    if arguments.margin is not None and not arguments.margin > 0:
        raise ConfigurationError(f"--margin must be above 0, got {arguments.margin:g}")
    folders = run_folder(arguments.first), run_folder(arguments.second)
    first, second = (open_history(folder, arguments.is_trusted) for folder in folders)
    difference = RunDifference(
        compare_runs(_names(folders), first, second),
        _paired(folders, arguments),
        (reward_fits(first), reward_fits(second)),
    )
    if arguments.json:
        print(json.dumps(difference.line()))
    else:
        TerminalConsole().print(render(difference))
    return 0


def _names(folders: tuple[RunFolder, RunFolder]) -> tuple[str, str]:
    first, second = distinct_names(folders)
    return first, second


def _paired(
    folders: tuple[RunFolder, RunFolder], arguments: argparse.Namespace
) -> tuple[PairedFigure, ...]:
    first, second = (
        _figures(locate_run(str(folder.path), arguments.is_trusted)) for folder in folders
    )
    return tuple(paired_figures(first, second, arguments.confidence, arguments.margin))


def _figures(location: RunLocation) -> RunFigures:
    with QuerySession(location, warn) as session:
        return read_figures(session)


def render(difference: RunDifference) -> RenderableType:
    """Renders for terminals of at least 80 columns."""
    compared = difference.compared
    parts = [_settings(compared), _outcomes(compared), _curves(compared), _pairs(difference)]
    parts += (
        [_equivalence(difference)]
        if any(figure.equivalence for figure in difference.paired)
        else []
    )
    parts += [_fits(difference)] if any(difference.fits) else []
    return Group(*(item for part in parts for item in (part, Text())), _states(compared))


def _settings(compared: RunComparison) -> RenderableType:
    if not compared.settings:
        return Text("settings: the same")
    table = _table("settings that differ", "setting", *compared.runs)
    for setting in compared.settings:
        table.add_row(setting.key, _shown(setting.first), _shown(setting.second))
    return table


def _outcomes(compared: RunComparison) -> RenderableType:
    table = _table("groups", "ending", *compared.runs)
    first, second = compared.outcomes
    for name in first:
        table.add_row(name, str(first[name]), str(second.get(name, 0)))
    return table


def _curves(compared: RunComparison) -> RenderableType:
    if not compared.curves:
        return Text("curves: no step is in both runs")
    table = _table("curves: mean of the last fifth", "figure", *compared.runs, "change", "course")
    for curve in compared.curves:
        a, b = curve.last
        course = f"{sparkline(curve.first, 8)} {sparkline(curve.second, 8)}".strip()
        table.add_row(curve.name, f"{a:.4g}", f"{b:.4g}", _change(a, b), course)
    return table


def _pairs(difference: RunDifference) -> RenderableType:
    if not difference.paired:
        return Text("pairs: the runs have too few prompts in common")
    confidence = difference.paired[0].found.confidence
    table = _table(
        f"B − A over pairs of one prompt, {confidence:.0%} intervals of these two runs",
        "figure", "pairs", "difference", "interval", "p", "finds",
    )  # fmt: skip
    for figure in difference.paired:
        estimate = figure.found
        interval = f"{estimate.low:+.3g} to {estimate.high:+.3g}"
        name = f"{figure.name}, {figure.where}"
        cells = (
            f"{estimate.difference:+.3g}",
            interval,
            f"{estimate.p:.2g}",
            f"{estimate.detectable:.2g}",
        )
        table.add_row(name, str(estimate.pairs), *cells)
    return table


def _equivalence(difference: RunDifference) -> RenderableType:
    tests = [(figure, figure.equivalence) for figure in difference.paired if figure.equivalence]
    table = _table(
        f"within ±{tests[0][1].margin:g}: two one-sided tests", "figure", "90 % interval", "p",
        "equivalent", "power",
    )  # fmt: skip
    for figure, test in tests:
        interval = f"{test.low:+.3g} to {test.high:+.3g}"
        shown = "yes" if test.is_shown else "not shown"
        name = f"{figure.name}, {figure.where}"
        table.add_row(name, interval, f"{test.p:.2g}", shown, f"{test.power:.0%}")
    return table


def _fits(difference: RunDifference) -> RenderableType:
    table = _table("sigmoid fits of the reward, 95 % intervals", "run", *FIT_HEAD[:3], FIT_HEAD[5])
    for run, fits in zip(difference.compared.runs, difference.fits, strict=True):
        for fit in fits:
            cells = fit.row()
            table.add_row(run, *cells[:3], cells[5])
    return table


def _states(compared: RunComparison) -> RenderableType:
    steps = f"{compared.states_compared} common steps"
    if not compared.states_compared:
        return Text("states: no common step")
    if compared.states_apart is None:
        return Text(f"states: identical at all {steps}")
    return Text(f"states: of {steps}, the first that differs is step {compared.states_apart}")


def _change(a: float, b: float) -> str:
    return f"{(b - a) / abs(a):+.1%}" if a else f"{b - a:+.3g}"


def _shown(value: Any) -> str:
    return "–" if value is None else json.dumps(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, style="dim" if number == 0 else "", overflow="fold")
    return table
