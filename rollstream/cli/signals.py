"""What commands share as processes: messages on stderr, stop signals as events, closed pipes.

It imports no configuration, so the light commands (query, tail, inspect) start fast.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, the shell convention


def warn(text: str) -> None:
    """Print a message on stderr, apart from the command's output."""
    print(f"rollstream: {text}", file=sys.stderr)


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


@dataclass(frozen=True, slots=True)
class StopSignals:
    """`stop` is set by the first signal, `hurry` by the next."""

    stop: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)


def listen_for_signals() -> StopSignals:
    """Install handlers for SIGINT, SIGTERM and SIGHUP; call it from the main thread."""
    signals = StopSignals()

    def handle(*_: object) -> None:
        (signals.hurry if signals.stop.is_set() else signals.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
            signal.signal(number, handle)
    return signals
