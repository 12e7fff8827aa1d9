"""Ctrl-C, SIGTERM and a closed terminal as events: the first asks to stop, the second to hurry."""

import signal
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopSignals:
    """`stop` is set by the first signal, `hurry` by the next."""

    stop: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)


def listen() -> StopSignals:
    """Take over SIGINT, SIGTERM and SIGHUP of this process; call it from the main thread."""
    signals = StopSignals()

    def handle(*_: object) -> None:
        (signals.hurry if signals.stop.is_set() else signals.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants to outlive its terminal
            signal.signal(number, handle)
    return signals
