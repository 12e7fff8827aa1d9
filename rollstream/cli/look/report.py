"""`rollstream report RUN [RUN …]`: writes a report as an HTML page and prints a summary, from the
runs' logs (with their archives) and metrics files alone.

One run gets a page in its own folder; several runs are compared on one page in the working
directory. The runs may be running, stopped or finished.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from rollstream.analysis.locate import locate_run
from rollstream.analysis.session import QuerySession
from rollstream.cli.arguments import RUN_HELP, CommandParser
from rollstream.cli.signals import warn
from rollstream.config.run_folder import run_folder
from rollstream.errors import ConfigurationError
from rollstream.report.comparison import RUNS_MAX, OverlaidRun, write_overlay
from rollstream.report.history import RunHistory
from rollstream.report.learning import learning_cards
from rollstream.report.summary import distinct_names, open_history, summarise
from rollstream.report.write import write_report


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
        "runs/quickstart-0 runs/quickstart-1 --output both.html",
    )
    command.add_runs(RUN_HELP)
    command.add_argument(
        "--output",
        metavar="FILE",
        help="output file (default RUN/report.html; ./report.html for several runs)",
    )
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Read the runs, write the page, and print a summary of each run, with `--json` as JSON lines.
    Raises `ConfigurationError` for more than `RUNS_MAX` runs.
    """
    folders = [run_folder(path) for path in arguments.runs]
    if len(folders) > RUNS_MAX:
        raise ConfigurationError(f"{len(folders)} runs: a page shows at most {RUNS_MAX}")
    histories = [open_history(folder) for folder in folders]
    runs = [
        OverlaidRun(name, history, summarise(history))
        for name, history in zip(distinct_names(folders), histories, strict=True)
    ]
    if len(runs) == 1:
        output = Path(arguments.output) if arguments.output else folders[0].report
        cards = _learning(str(folders[0].path), runs[0].history)
        write_report(runs[0].history, runs[0].summary, output, cards)
    else:
        output = Path(arguments.output or "report.html")
        write_overlay(runs, output)
    if arguments.json:
        for run in runs:
            print(json.dumps(run.summary.line()))
        return 0
    console = Console()
    for run in runs:
        console.print(run.summary.table())
    console.print(f"report: {output}", soft_wrap=True, highlight=False)
    return 0


def _learning(run: str, history: RunHistory) -> list[str]:
    with QuerySession(locate_run(run), warn) as session:
        return learning_cards(history, session)
