"""Commands that print as much as is asked for end quietly when nobody reads on (`… | head`)."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import wraps

CLOSED = 141  # 128 + SIGPIPE, as shells say it


def ending_quietly(
    main: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """`main`, for which a reader that went away is no error to be told."""

    @wraps(main)
    def guarded(arguments: argparse.Namespace) -> int:
        try:
            code = main(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes once more at its end, and would complain there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED
        return code

    return guarded
