"""Runs one command of the command line, `rollstream COMMAND …`, and returns its exit code.

Exit codes: 0 done, 1 failed, 2 refused (command line, configuration, or a run of a newer release),
3 an engine or server could not be opened, 130 interrupted. Some commands use 1 and 2 for their
result, as `audit` does (docs/reference/exit-codes.md).
"""

import argparse
import gc
import sys
from collections.abc import Sequence

from rollstream import errors
from rollstream.cli.commands import HELP_WORDS, choose_parser, help_lines

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv` (default: the words that the process was started with); returns its
    exit code. A `RollstreamError` becomes a message on stderr.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in HELP_WORDS:
        print("\n".join(help_lines()))
        return 0
    if words[0] == "--version":
        print(_version())
        return 0
    gc.disable()  # imports leave no garbage; collection would take a tenth of the start of `query`
    try:
        parser, rest = choose_parser(words)
        arguments = parser.parse(rest)
        gc.enable()
        parser.find_runs(arguments)
        return parser.main(arguments)
    except errors.RollstreamError as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        gc.enable()


def exit_code_of(error: errors.RollstreamError) -> int:
    """Return the exit code of a command that this error ends."""
    if isinstance(error, errors.ConfigurationError | errors.NewerRelease):
        return errors.EXIT_REFUSED
    is_passing = isinstance(error, errors.EngineUnavailable | errors.EveryGroupDied)
    return errors.EXIT_UNSERVED if is_passing else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line as `main` does, but leave the names of runs as they are; `main` replaces
    them by folders afterwards (`find_runs`).
    """
    parser, rest = choose_parser(words)
    return parser.parse(rest)


def _version() -> str:
    """Return the release and the code revision, for which git may run."""
    from rollstream.revision import code_revision
    from rollstream.streams.release import RELEASE

    return f"rollstream {RELEASE} ({code_revision()})"
