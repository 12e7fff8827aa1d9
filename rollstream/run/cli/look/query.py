"""`rollstream query RUN "SELECT …"`: one read-only SQL query over log and archive, in DuckDB;
`--tables` lists the views (`analysis/views.py`).
"""

import argparse
import json
import shutil
import sys
from textwrap import fill

from rollstream.errors import ConfigurationError
from rollstream.look.figures.columns import COLUMNS
from rollstream.look.query.confinement import confine
from rollstream.look.query.locate import locate_asked_run
from rollstream.look.query.output import json_lines, tab_lines, table_lines, write_csv
from rollstream.look.query.session import QuerySession
from rollstream.look.query.views import VIEWS
from rollstream.run.cli.arguments import (
    COUNT_MAX,
    RUN_OR_ARCHIVE_HELP,
    CommandParser,
    whole_number_from,
)
from rollstream.run.signals import warn

TABLE_ROWS = 40


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        'runs/quickstart-0 "SELECT step, reward_mean FROM steps"',
        '"SELECT rollout, count(*) FROM trajectories GROUP BY ALL" --json',
        "--tables",
    )
    command.add_run(RUN_OR_ARCHIVE_HELP, before=("sql",))
    command.add_argument("sql", metavar="SQL", nargs="?", help="one SQL query, read-only")
    command.add_argument("--run", metavar="RUN", dest="named", help="the same as RUN")
    help = "list views and their columns: type, meaning, and the release since which each is stable"
    command.add_argument("--tables", action="store_true", help=help)
    command.add_argument("--csv", action="store_true", help="print comma-separated values")
    command.add_argument(
        "--rows", metavar="N", type=whole_number_from(1, COUNT_MAX),
        help=f"rows of the table (default {TABLE_ROWS} on a terminal, all in a pipe)",
    )  # fmt: skip
    command.add_archive()
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    if arguments.sql is None and not arguments.tables:
        raise ConfigurationError(
            'no query given; e.g. rollstream query "SELECT count(*) FROM trajectories"; '
            "--tables lists the views"
        )
    if arguments.csv and arguments.json:
        raise ConfigurationError("--csv and --json are two forms of the rows: give one of them")
    rows: int | None = arguments.rows
    location = locate_asked_run(arguments.run, arguments.name, warn, arguments.is_trusted)
    with QuerySession(location, warn, arguments.skip_corrupt) as session:
        confine(session.connection, location)
        if arguments.tables:
            _list_views(session, arguments.json)
            return 0
        answer = session.answer(str(arguments.sql))
        if arguments.json:
            for line in json_lines(answer):
                print(line)
        elif arguments.csv:
            write_csv(answer, sys.stdout)
        else:
            width = shutil.get_terminal_size().columns
            is_cut = sys.stdout.isatty()
            for line in (
                table_lines(answer, rows or TABLE_ROWS, width)
                if is_cut
                else tab_lines(answer, rows)
            ):
                print(line)
    return 0


def _list_views(session: QuerySession, as_json: bool) -> None:
    for view in VIEWS.values():
        columns = session.columns(view.name)
        promised = COLUMNS[view.name]
        if as_json:
            line = {
                "view": view.name,
                "sentence": view.sentence,
                "columns": columns,
                "meanings": {name: promised[name].meaning for name in columns},
                "since": {name: promised[name].since for name in columns},
            }
            print(json.dumps(line))
            continue
        print(f"{view.name}: {view.sentence}")
        if view.name == "completions":
            print("    its columns are those of trajectories\n")
            continue
        for name, kind in columns.items():
            text = f"{name} {kind}: {promised[name].meaning} ({promised[name].since})"
            print(fill(text, 100, initial_indent="    ", subsequent_indent="        "))
        print()
