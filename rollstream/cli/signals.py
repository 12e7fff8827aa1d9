"""Converts Ctrl-C, SIGTERM and SIGHUP to events: the first requests a stop, the second a
quick one.
"""

import signal
import threading
from dataclasses import dataclass, field


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
