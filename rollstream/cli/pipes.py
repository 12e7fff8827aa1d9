"""Commands with long output exit quietly when the reader closes the pipe (`… | head`)."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import wraps

EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, the shell convention


def quiet_on_closed_pipe(
    main: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Wraps `main` so that a closed pipe ends it without an error message."""

    @wraps(main)
    def guarded(arguments: argparse.Namespace) -> int:
        try:
            code = main(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes stdout again at exit, which would print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_CLOSED_PIPE
        return code

    return guarded
