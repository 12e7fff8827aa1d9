"""`rollstream trace RUN --perfetto FILE`: rollouts, steps, versions and moves as a trace for
ui.perfetto.dev.
"""

import argparse
from pathlib import Path

from rollstream.look.query.locate import locate_asked_run
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.run.signals import warn
from rollstream.whole_file import check_output

TRACE_FILE = "trace.json.gz"


def add_arguments(command: CommandParser) -> None:
    command.add_examples("runs/quickstart-0 --perfetto trace.json.gz")
    command.add_run(RUN_OR_ARCHIVE_HELP)
    command.add_archive_run()
    help = f"output file, JSON trace events compressed by gzip (default {TRACE_FILE})"
    command.add_argument("--perfetto", metavar="FILE", help=help)


def main(arguments: argparse.Namespace) -> int:
    from rollstream.look.explorer.answers.trace import write_trace

    path = Path(arguments.perfetto or TRACE_FILE)
    check_output(path)
    location = locate_asked_run(arguments.run, arguments.name, warn, arguments.is_trusted)
    count = write_trace(location, path, is_typed=arguments.perfetto is not None)
    print(f"{path}: {count:,} events; open it in https://ui.perfetto.dev")
    return 0
