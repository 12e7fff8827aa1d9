"""`rollstream eval`: evaluates a run's new versions, or stored ones with `--versions`."""

import argparse
import json
from typing import Any

from rollstream.cli import role
from rollstream.cli.arguments import EXAMPLE_RUN, CommandParser
from rollstream.cli.configuration import load_configuration
from rollstream.errors import ConfigurationError


def add_arguments(command: CommandParser) -> None:
    command.add_examples(EXAMPLE_RUN, f"{EXAMPLE_RUN} --versions 0,10,60 --samples 16 --json")
    command.add_process_name()
    command.add_log()
    command.add_argument(
        "--versions", metavar="N,N…", help="evaluate these stored versions, then exit"
    )
    command.add_argument("--samples", metavar="N", type=int, help="samples per prompt")
    command.add_configuration()
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Run as a role, or print one line per stored version."""
    if arguments.versions is None:
        return role.main(arguments)
    versions = parse_versions(arguments.versions)
    if arguments.samples is not None:
        arguments.overrides.append(f"evaluation.samples={arguments.samples}")
    configuration, folder = load_configuration(arguments)
    from rollstream.roles.roles import (
        evaluate_versions,  # imports torch, which takes seconds: after validation
    )

    for line in evaluate_versions(configuration, folder.path, versions):
        print(json.dumps(line) if arguments.json else in_words(line), flush=True)
    return 0


def parse_versions(text: str) -> list[int]:
    """Parses `0,10,60`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--versions {text!r}: write numbers, e.g. 0,10,60") from None


def in_words(line: dict[str, Any]) -> str:
    """Returns one evaluation as a readable line."""
    return (
        f"version {line['step']}: sampled accuracy {line['accuracy_sampled']:.3f}, "
        f"greedy {line['accuracy_greedy']:.3f}, "
        f"length median {line['length_median']:g}, p99 {line['length_p99']:g}"
    )
