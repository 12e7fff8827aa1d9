"""The command line: `rollstream COMMAND …`. Each command is one module of `rollstream/commands/`.

Nothing but the parser is imported until a command was understood, so `--help` answers at once.
Exit codes: 0 done, 1 failed, 2 refused (command line or configuration), 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeAlias

from rollstream.restarts import EXIT_REFUSED
from streams.errors import ConfigurationError, RollstreamError

EXAMPLE_RUN = "runs/quickstart-0/config.json"
INTERRUPTED = 130  # 128 + SIGINT, as shells say it

ROLES = {
    "prompts": "publish prompts in the task's seeded order",
    "dispatch": "admit groups and give their trajectories to rollouts",
    "rollout": "generate trajectories under weights that change underneath",
    "train": "consume trajectories and publish versions",
}
"""The commands that run one role, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = parser().parse_args(argv)
    try:
        return import_module(f"rollstream.commands.{arguments.module}").main(arguments)
    except ConfigurationError as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except RollstreamError as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    top = argparse.ArgumentParser(
        prog="rollstream",
        description="RL post-training of language models as a streaming dataflow.",
        epilog="example:\n  rollstream run examples/quickstart.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    for name, purpose in ROLES.items():
        _add_role(commands, name, purpose)
    _add_evaluation(commands)
    _add_warmup(commands)
    _add_report(commands)
    return top


# argparse has no public name for what add_subparsers returns
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]


def _add(
    commands: Commands, name: str, module: str, purpose: str, *examples: str
) -> argparse.ArgumentParser:
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


def _add_configuration(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "configuration", metavar="CONFIG", help="TOML file, or a run's config.json"
    )
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="set one setting, e.g. trainer.lr=1e-4; wins over file and environment",
    )
    command.add_argument("--run", metavar="DIR", help="the run's folder")
    command.add_argument("--seed", metavar="N", help="the run's seed")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON lines for programs")


def _add_run(commands: Commands) -> None:
    command = _add(
        commands,
        "run",
        "run",
        "start all that CONFIG names and watch it; Ctrl-C stops, the same again goes on",
        "examples/quickstart.toml",
        "examples/quickstart.toml --seed 2 --run runs/two --set trainer.lr=1e-4",
    )
    _add_configuration(command)
    _add_json(command)


def _add_role(commands: Commands, name: str, purpose: str) -> None:
    command = _add(commands, name, "role", f"run one role: {purpose}", EXAMPLE_RUN)
    _add_name(command, name)
    _add_configuration(command)


def _add_name(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("--name", default=name, help=f"name of this process (default {name})")


def _add_evaluation(commands: Commands) -> None:
    command = _add(
        commands,
        "eval",
        "evaluate",
        "evaluate versions on held-out prompts: new ones as they come, or stored ones",
        EXAMPLE_RUN,
        f"{EXAMPLE_RUN} --versions 0,10,60 --samples 16 --json",
    )
    _add_name(command, "eval")
    command.add_argument("--versions", metavar="N,N…", help="stored versions, then end")
    command.add_argument("--samples", metavar="N", type=int, help="samples per prompt")
    _add_configuration(command)
    _add_json(command)


def _add_warmup(commands: Commands) -> None:
    command = _add(
        commands,
        "warmup",
        "warmup",
        "make the run's first policy by supervised training on the task's documents",
        EXAMPLE_RUN,
    )
    _add_configuration(command)


def _add_report(commands: Commands) -> None:
    command = _add(
        commands,
        "report",
        "report",
        "write RUN/report.html and print a summary, of a finished or a living run",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder")
    command.add_argument(
        "--output", metavar="FILE", help="where to write (default RUN/report.html)"
    )
    _add_json(command)
