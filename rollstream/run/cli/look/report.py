"""`rollstream report RUN [RUN …]`: an HTML page and a printed summary, from logs, archives and
metrics files. One run gets a page in its own folder, several share one in the working directory.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.serving.report_file import write_overlay, write_report
from rollstream.look.query.locate import locate_run
from rollstream.look.report.comparison import RUNS_MAX, OverlaidRun
from rollstream.look.report.serve import ReportPages, parse_address, serve_report, wait_until_over
from rollstream.look.report.summary import distinct_names, open_history, summarise
from rollstream.run.cli.arguments import RUN_HELP, CommandParser
from rollstream.run.cli.main import EXIT_INTERRUPTED
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import RunFolder, run_folder
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import listen_for_signals, warn
from rollstream.whole_file import check_output


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
    command.add_argument(
        "--when-complete",
        action="store_true",
        help="wait until the run is complete and its last version is evaluated",
    )
    command.add_argument(
        "--serve",
        metavar="HOST:PORT",
        help="then serve the page by HTTP until a signal; before that it answers 503 and the step",
    )
    command.add_json()
    command.add_figures(
        "run.seconds", "run.tokens_trained", "run.tokens_per_s", "run.lag_consumed_mean",
        "evaluation.accuracy_sampled", "evaluation.accuracy_greedy", "fate.answers",
        "rollout.idle_share", "run.restarts",
    )  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Raises `ConfigurationError` for more than `RUNS_MAX` runs."""
    folders = [run_folder(path) for path in arguments.runs]
    if len(folders) > RUNS_MAX:
        raise ConfigurationError(f"{len(folders)} runs: a page shows at most {RUNS_MAX}")
    if arguments.output:
        check_output(Path(arguments.output))
    if not (arguments.when_complete or arguments.serve):
        _report(folders, arguments)
        return 0
    if len(folders) > 1:
        raise ConfigurationError("--when-complete and --serve take one run")
    return _report_later(folders[0], arguments)


def _report_later(folder: RunFolder, arguments: argparse.Namespace) -> int:
    stop = listen_for_signals().stop
    path = Path(arguments.output) if arguments.output else folder.report
    pages = ReportPages(path, load_for_viewing(folder.configuration).trainer.steps)
    server = serve_report(parse_address(arguments.serve), pages) if arguments.serve else None
    try:
        on_step = partial(setattr, pages, "step")
        if arguments.when_complete and not wait_until_over(folder, stop, on_step):
            return EXIT_INTERRUPTED
        _report([folder], arguments)
        pages.is_written = True
        if server is not None:
            print(f"the report is served: http://127.0.0.1:{server.port}/", flush=True)
            stop.wait()
    finally:
        if server is not None:
            server.end()
    return 0


def _report(folders: Sequence[RunFolder], arguments: argparse.Namespace) -> None:
    histories = [open_history(folder, arguments.is_trusted) for folder in folders]
    runs = [
        OverlaidRun(name, history, summarise(history))
        for name, history in zip(distinct_names(folders), histories, strict=True)
    ]
    is_typed = bool(arguments.output)
    if len(runs) == 1:
        output = Path(arguments.output) if arguments.output else folders[0].report
        location = locate_run(str(folders[0].path), arguments.is_trusted)
        write_report(runs[0].history, runs[0].summary, output, location, is_typed, warn)
    else:
        output = Path(arguments.output or "report.html")
        write_overlay(runs, output, is_typed)
    if arguments.json:
        for run in runs:
            print(json.dumps(run.summary.line()))
        return
    console = TerminalConsole()
    for run in runs:
        console.print(run.summary.table())
    console.print(f"report: {output}", soft_wrap=True, highlight=False)
