"""The command line: `rollstream COMMAND …`. Each command is one module.

Only the parser is imported before a command is parsed, so `--help` is fast. Exit codes: 0 done, 1
failed, 2 refused (command line, configuration, or a run of a newer release), 3 an engine or server
could not be opened, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from rollstream.cli.grammar import add_monitor_commands, add_query_commands
from rollstream.cli.grammar_runs import add_run_commands, add_storage_commands
from rollstream.errors import ConfigurationError, NewerRelease, RollstreamError
from rollstream.roles.engine_errors import EngineUnavailable
from rollstream.supervisor.process import EXIT_REFUSED, EXIT_UNSERVED

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = parser().parse_args(argv)
    try:
        return import_module(f"rollstream.cli.{arguments.module}").main(arguments)
    except (ConfigurationError, NewerRelease) as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except EngineUnavailable as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return EXIT_UNSERVED
    except RollstreamError as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _VersionAction(argparse.Action):
    """Prints release and revision; git runs only for this option."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print release and code revision")

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from rollstream.revision import code_revision
        from rollstream.streams.release import RELEASE

        print(f"rollstream {RELEASE} ({code_revision()})")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="rollstream",
        description="RL post-training of language models as a streaming dataflow.",
        epilog="example:\n  rollstream run examples/quickstart.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_VersionAction)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_run_commands(commands)
    add_monitor_commands(commands)
    add_query_commands(commands)
    add_storage_commands(commands)
    return top
