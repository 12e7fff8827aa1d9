"""Runs one command of the command line, `rollstream COMMAND …`, and returns its exit code.

Exit codes: 0 done, 1 failed, 2 refused (command line, configuration, or a run of a newer release),
3 an engine or server could not be opened, 130 interrupted.
"""

import argparse
import gc
import sys
from collections.abc import Sequence

from rollstream.cli.commands import HELP_WORDS, choose_parser, help_lines
from rollstream.errors import (
    EXIT_REFUSED,
    EXIT_UNSERVED,
    ConfigurationError,
    EngineUnavailable,
    NewerRelease,
    RollstreamError,
)

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in HELP_WORDS:
        print("\n".join(help_lines()))
        return 0
    if words[0] == "--version":
        print(_version())
        return 0
    gc.disable()  # imports leave no garbage, and collecting takes a tenth of a query's own start
    try:
        parser, rest = choose_parser(words)
        arguments = parser.parse(rest)
        gc.enable()
        parser.find_runs(arguments)
        return parser.main(arguments)
    except RollstreamError as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        gc.enable()


def exit_code_of(error: RollstreamError) -> int:
    """Return the exit code of a command that this error ends."""
    if isinstance(error, ConfigurationError | NewerRelease):
        return EXIT_REFUSED
    return EXIT_UNSERVED if isinstance(error, EngineUnavailable) else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line without looking for its run."""
    parser, rest = choose_parser(words)
    return parser.parse(rest)


def _version() -> str:
    """Return the release and the code revision, for which git may run."""
    from rollstream.revision import code_revision
    from rollstream.streams.release import RELEASE

    return f"rollstream {RELEASE} ({code_revision()})"
