"""`rollstream eval`: follow a run, or with `--versions` evaluate stored versions and end."""

import argparse
import json
from typing import Any

from rollstream.commands import role
from rollstream.commands.configured import loaded
from streams.errors import ConfigurationError


def main(arguments: argparse.Namespace) -> int:
    """Follow as a role, or print a line per stored version."""
    if arguments.versions is None:
        return role.main(arguments)
    versions = parse_versions(arguments.versions)
    if arguments.samples is not None:
        arguments.overrides.append(f"evaluation.samples={arguments.samples}")
    configuration, folder = loaded(arguments)
    from rollstream.roles import evaluate_versions  # torch, seconds: after a mistake was told

    for line in evaluate_versions(configuration, folder.path, versions):
        print(json.dumps(line) if arguments.json else in_words(line), flush=True)
    return 0


def parse_versions(text: str) -> list[int]:
    """`0,10,60` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--versions {text!r}: write numbers, e.g. 0,10,60") from None


def in_words(line: dict[str, Any]) -> str:
    """One evaluation for people."""
    return (
        f"version {line['step']}: sampled accuracy {line['accuracy_sampled']:.3f}, "
        f"greedy {line['accuracy_greedy']:.3f}, "
        f"length median {line['length_median']:g}, p99 {line['length_p99']:g}"
    )
