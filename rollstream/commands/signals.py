"""Ctrl-C and SIGTERM as events: the first asks to stop, the second to stop at once."""

import signal
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopSignals:
    """`stop` is set by the first signal, `hurry` by the next."""

    stop: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)


def listen() -> StopSignals:
    """Take over SIGINT and SIGTERM of this process; call it from the main thread."""
    signals = StopSignals()

    def handle(*_: object) -> None:
        (signals.hurry if signals.stop.is_set() else signals.stop).set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return signals
