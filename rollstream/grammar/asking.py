"""Commands that ask the log and the archive: query, tail, inspect, audit."""

import argparse

from rollstream.grammar.parts import Commands, add, add_json

RUN = "a run's folder, its config.json, or an archive (folder or store URL); default: the newest"


def add_asking(commands: Commands) -> None:
    """`query` and its neighbours."""
    _add_query(commands)
    _add_tail(commands)
    _add_inspect(commands)
    _add_audit(commands)


def _add_query(commands: Commands) -> None:
    command = add(
        commands,
        "query",
        "query",
        "ask a run's log and archive in SQL; --tables lists the views",
        '"SELECT step, reward_mean FROM steps" --run runs/quickstart-0',
        '"SELECT rollout, count(*) FROM trajectories GROUP BY ALL" --json',
        "--tables",
    )
    command.add_argument("sql", metavar="SQL", nargs="?", help="one query; nothing is written")
    command.add_argument("--run", metavar="RUN", help=RUN)
    command.add_argument("--tables", action="store_true", help="list views and their columns")
    command.add_argument("--csv", action="store_true", help="print comma-separated values")
    command.add_argument(
        "--rows", metavar="N", type=int, default=40, help="of the table (default 40)"
    )
    _add_archive(command)
    add_json(command)


def _add_tail(commands: Commands) -> None:
    command = add(
        commands,
        "tail",
        "tail",
        "print a topic's records in words, one a line",
        "trajectories runs/quickstart-0 --last 5",
        "trajectories --follow --where 'reward>=1' --where rollout=rollout-0",
        "ledger --from begin --where schema=step_done --json",
    )
    command.add_argument("topic", metavar="TOPIC", help="e.g. trajectories, ledger, status")
    command.add_argument("run", metavar="RUN", nargs="?", help=RUN)
    command.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    command.add_argument(
        "--from",
        metavar="WHERE",
        dest="start",
        help="begin, end, or an offset (in every partition, or with --partition in one)",
    )
    command.add_argument("--last", metavar="N", type=int, help="begin N records before the end")
    command.add_argument("--partition", metavar="P", type=int, help="this partition alone")
    command.add_argument(
        "--where",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="records whose field, e.g. version.number, is = != < <= > >= a value or ~ contains it",
    )
    _add_archive(command)
    add_json(command)


def _add_inspect(commands: Commands) -> None:
    command = add(
        commands,
        "inspect",
        "inspect",
        "show one trajectory: its text by version, reward, where it ran, what became of it",
        "12.3 runs/quickstart-0",
        "--last --logprobs",
        "--group 12 --json",
    )
    command.add_argument(
        "trajectory", metavar="TRAJECTORY", nargs="?", help="its name, or a beginning of it"
    )
    command.add_argument("run", metavar="RUN", nargs="?", help=RUN)
    command.add_argument("--group", metavar="N", type=int, help="all trajectories of a group")
    command.add_argument("--last", action="store_true", help="the one that finished last")
    command.add_argument("--logprobs", action="store_true", help="a table of all its tokens")
    _add_archive(command)
    add_json(command)


def _add_audit(commands: Commands) -> None:
    command = add(
        commands,
        "audit",
        "audit",
        "check that a run kept its invariants; exit code 1 if not, 2 if parts could not be checked",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
    )
    command.add_argument("run", metavar="RUN", nargs="?", help=RUN)
    command.add_argument("--name", metavar="NAME", help="the run, where an archive holds several")
    add_json(command)


def _add_archive(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", metavar="NAME", help="the run, where an archive holds several")
    command.add_argument(
        "--skip-corrupt",
        action="store_true",
        help="go on without damaged archive files; reads each of them whole first",
    )
