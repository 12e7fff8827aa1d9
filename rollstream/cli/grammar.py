"""Parsers of the commands that read log and archive: query, tail, inspect, audit."""

import argparse

from rollstream.cli.parts import Subcommands, add_command, add_json

RUN_OR_ARCHIVE_HELP = "run folder, its config.json, or an archive (folder or store URL); default: newest run"


def add_query_commands(commands: Subcommands) -> None:
    """Add `query`, `tail`, `inspect` and `audit`."""
    _add_query(commands)
    _add_tail(commands)
    _add_inspect(commands)
    _add_audit(commands)


def _add_query(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "query",
        "query",
        "query a run's log and archive in SQL; --tables lists the views",
        '"SELECT step, reward_mean FROM steps" --run runs/quickstart-0',
        '"SELECT rollout, count(*) FROM trajectories GROUP BY ALL" --json',
        "--tables",
    )
    command.add_argument("sql", metavar="SQL", nargs="?", help="one SQL query, read-only")
    command.add_argument("--run", metavar="RUN", help=RUN_OR_ARCHIVE_HELP)
    command.add_argument("--tables", action="store_true", help="list views and their columns")
    command.add_argument("--csv", action="store_true", help="print comma-separated values")
    command.add_argument(
        "--rows", metavar="N", type=int, default=40, help="rows of the printed table (default 40)"
    )
    _add_archive(command)
    add_json(command)


def _add_tail(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "tail",
        "tail",
        "print a topic's records, one readable line each",
        "trajectories runs/quickstart-0 --last 5",
        "trajectories --follow --where 'reward>=1' --where rollout=rollout-0",
        "ledger --from begin --where schema=step_done --json",
    )
    command.add_argument("topic", metavar="TOPIC", help="e.g. trajectories, ledger, status")
    command.add_argument("run", metavar="RUN", nargs="?", help=RUN_OR_ARCHIVE_HELP)
    command.add_argument(
        "--follow", action="store_true", help="keep printing new records until Ctrl-C"
    )
    command.add_argument(
        "--from",
        metavar="WHERE",
        dest="start",
        help="start at begin, end, or an offset (of each partition, or of the one of --partition)",
    )
    command.add_argument("--last", metavar="N", type=int, help="start N records before the end")
    command.add_argument("--partition", metavar="P", type=int, help="read only this partition")
    command.add_argument(
        "--where",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="only records whose field, e.g. version.number, is = != < <= > >= VALUE; ~ contains",
    )
    _add_archive(command)
    add_json(command)


def _add_inspect(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "inspect",
        "inspect",
        "show one trajectory: text by version, reward, rollouts, and the steps that trained it",
        "12.3 runs/quickstart-0",
        "--last --logprobs",
        "--group 12 --json",
    )
    command.add_argument(
        "trajectory",
        metavar="TRAJECTORY",
        nargs="?",
        help="its name, or the first characters of it",
    )
    command.add_argument("run", metavar="RUN", nargs="?", help=RUN_OR_ARCHIVE_HELP)
    command.add_argument("--group", metavar="N", type=int, help="all trajectories of a group")
    command.add_argument("--last", action="store_true", help="the trajectory that finished last")
    command.add_argument("--logprobs", action="store_true", help="also print a table of all tokens")
    _add_archive(command)
    add_json(command)


def _add_audit(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "audit",
        "audit",
        "check a run's invariants; exit code 1 if violated, 2 if parts could not be checked",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
    )
    command.add_argument("run", metavar="RUN", nargs="?", help=RUN_OR_ARCHIVE_HELP)
    command.add_argument("--name", metavar="NAME", help="run name, if an archive holds several")
    add_json(command)


def _add_archive(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", metavar="NAME", help="run name, if an archive holds several")
    command.add_argument(
        "--skip-corrupt",
        action="store_true",
        help="leave out damaged archive files; reads every file completely first",
    )
