"""Runs one command, `rollstream COMMAND …`, and returns its exit code
(docs/reference/exit-codes.md): 0 done, 1 failed, 2 refused (command line, configuration, or a run
of a newer release), 3 an engine or server could not be opened, 130 interrupted. Some commands use 1
and 2 for their result.
"""

import argparse
import errno
import gc
import sys
from collections.abc import Sequence

from rollstream import errors
from rollstream.os_failures import explain_os_error, is_of_the_machine
from rollstream.printable import outlast_output, printable_output, protect_output
from rollstream.run.cli.commands import HELP_WORDS, WORKING, choose_parser, help_lines
from rollstream.run.role_catalogue import ROLES

# 128 + SIGINT, as shells report it.
EXIT_INTERRUPTED = 130
# Characters of a path or word in an error message.
WORD_SHOWN = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command of `argv` (default: the process's own words). A `RollstreamError` becomes a
    message on stderr, as does an `OSError` whose cause is the machine (a full disk, no more files).
    All output is printable.
    """
    if argv is None:
        # For good: a traceback is printed after this function.
        protect_output()
        return _run(sys.argv[1:])
    with printable_output():
        return _run(argv)


def _run(words: Sequence[str]) -> int:
    try:
        try:
            return _command(words)
        finally:
            sys.stdout.flush()
    except errors.RollstreamError as error:
        if not (isinstance(error, errors.OutputLost) and error.is_closed):
            print(f"rollstream: {_with_short_words(str(error), words)}", file=sys.stderr)
        return exit_code_of(error)
    except OSError as error:
        # The role's log has the traceback.
        if words[0] in ROLES and not is_of_the_machine(error):
            raise
        place = "" if error.filename is None else f"{_shown(str(error.filename))}: "
        print(f"rollstream: {place}{explain_os_error(error)}", file=sys.stderr)
        return errors.EXIT_REFUSED if error.errno == errno.ENAMETOOLONG else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ImportError as error:
        if not _is_interrupted(error):
            raise
        return EXIT_INTERRUPTED
    finally:
        gc.enable()


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is the cause of the error, which C++ code raises in its place."""
    while error is not None and "KeyboardInterrupt" not in f"{type(error).__name__} {error}":
        error = error.__cause__ or error.__context__
    return error is not None


def _with_short_words(message: str, words: Sequence[str]) -> str:
    for word in words:
        if "\n" in word or len(word) > WORD_SHOWN:
            message = message.replace(word, _shown(word)).replace(repr(word), repr(_shown(word)))
    return message


def _shown(word: str) -> str:
    cut = word if len(word) <= WORD_SHOWN else f"{word[:WORD_SHOWN]}…"
    return cut.replace("\n", "\\n")


def _command(words: Sequence[str]) -> int:
    if not words or words[0] in HELP_WORDS:
        print("\n".join(help_lines()))
        return 0
    if words[0] == "--version":
        print(_version())
        return 0
    # Imports leave no garbage; collection would take a tenth of the start of `query`.
    gc.disable()
    parser, rest = choose_parser(words)
    arguments = parser.parse(rest)
    gc.enable()
    if parser.command in WORKING:
        outlast_output()
    parser.find_runs(arguments)
    return parser.main(arguments)


def exit_code_of(error: errors.RollstreamError) -> int:
    """Returns the exit code of a command that this error ends."""
    if isinstance(error, errors.ConfigurationError | errors.NewerRelease):
        return errors.EXIT_REFUSED
    if isinstance(error, errors.OutputLost) and error.is_closed:
        return errors.EXIT_CLOSED_PIPE
    is_passing = isinstance(error, errors.EngineUnavailable | errors.EveryGroupDied)
    return errors.EXIT_UNSERVED if is_passing else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses as `main`, but leaves the names of runs as they are."""
    parser, rest = choose_parser(words)
    return parser.parse(rest)


def _version() -> str:
    # git may run.
    from rollstream.revision import code_revision
    from rollstream.streams.release import RELEASE

    return f"rollstream {RELEASE} ({code_revision()})"
