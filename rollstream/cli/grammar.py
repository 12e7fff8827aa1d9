"""Argument parsers of the commands that read or monitor a run, and their building blocks.

Nothing here imports the commands' own modules, so `--help` answers at once.
"""

import argparse
from typing import TypeAlias

EXAMPLE_RUN = "runs/quickstart-0/config.json"

# argparse has no public name for the type that add_subparsers returns
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]


def add_command(
    commands: Subcommands, name: str, module: str, purpose: str, *examples: str
) -> argparse.ArgumentParser:
    """Add a command with its examples; `rollstream.cli.<module>` runs it."""
    lines = "".join(f"\n  rollstream {name} {example}" for example in examples)
    command = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example{'s' if len(examples) > 1 else ''}:{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(module=module)
    return command


def add_configuration(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "configuration", metavar="CONFIG", help="TOML file, a run's config.json, or its folder"
    )
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one setting, e.g. trainer.lr=1e-4; wins over file and environment",
    )
    command.add_argument("--run", metavar="DIR", help="the run's folder")
    command.add_argument("--seed", metavar="N", help="the run's seed")


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON lines instead of text")


def add_name(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("--name", default=name, help=f"name of this process (default {name})")


RUN_OR_ARCHIVE_HELP = (
    "run folder, its config.json, or an archive (folder or store URL); default: newest run"
)


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


def add_monitor_commands(commands: Subcommands) -> None:
    """Add `report`, `diff`, `health`, `forward` and `top`."""
    _add_report(commands)
    _add_diff(commands)
    _add_health(commands)
    _add_forward(commands)
    _add_top(commands)


def _add_report(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "report",
        "report",
        "write RUN/report.html and print a summary; several runs share one page",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
        "runs/quickstart-0 runs/quickstart-1 --output both.html",
    )
    command.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a running or finished run"
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="output file (default RUN/report.html; ./report.html for several runs)",
    )
    add_json(command)


def _add_diff(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "diff",
        "diff",
        "compare two runs: settings, outcomes, curves, state hashes",
        "runs/quickstart-0 runs/quickstart-1",
        "runs/quickstart-0 runs/quickstart-1 --json",
    )
    command.add_argument("first", metavar="A", help="folder of the first run")
    command.add_argument("second", metavar="B", help="folder of the second run")
    add_json(command)


def _add_forward(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "forward",
        "forward",
        "send a run's metrics files to TensorBoard or Weights & Biases; resumes where it stopped",
        "runs/quickstart-0 --to tensorboard",
        "runs/quickstart-0 --to wandb --follow",
    )
    command.add_argument("run", metavar="RUN", help="folder of a running or finished run")
    command.add_argument("--to", required=True, choices=("tensorboard", "wandb"), help="target")
    command.add_argument("--follow", action="store_true", help="keep forwarding until Ctrl-C")
    add_json(command)


def _add_top(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "top",
        "top",
        "watch a running or finished run: rates, lag, queues, versions, warnings; q quits",
        "runs/quickstart-0",
        "runs/quickstart-0 --once",
        "runs/quickstart-0/config.json --json --every 5",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder, or its config.json")
    command.add_argument("--once", action="store_true", help="print one frame and exit")
    command.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="refresh interval (default 1)"
    )
    add_json(command)


def _add_health(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "health",
        "health",
        "check a process on this machine; exit code 1 if it is stalled or does not answer",
        "--port 9464",
    )
    command.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=9464,
        help="the process's metrics port (default 9464)",
    )
    add_json(command)
