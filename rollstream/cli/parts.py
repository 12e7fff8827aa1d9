"""Building blocks of the commands' argument parsers."""

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
