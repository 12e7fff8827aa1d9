"""Messages and progress on stderr, and stop signals as events. Imports no configuration."""

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollstream.printable import printable, raw_stream


def warn(text: str) -> None:
    print(f"rollstream: {text}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class StopSignals:
    """The first signal sets `stop` (end in order), the next one `hurry` (end at once)."""

    stop: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)


def listen_for_signals() -> StopSignals:
    """Installs handlers for SIGINT, SIGTERM and SIGHUP. Only the main thread may call it."""
    # These two imports take 2 ms, which commands that need no signals save.
    import signal
    from queue import SimpleQueue

    signals = StopSignals()
    # A handler may interrupt `stop.wait`, which holds the event's lock: `set` there would wait for
    # ever. `SimpleQueue.put` is reentrant, and another thread sets the events.
    received: SimpleQueue[int] = SimpleQueue()

    def set_events() -> None:
        while True:
            received.get()
            (signals.hurry if signals.stop.is_set() else signals.stop).set()

    threading.Thread(target=set_events, name="signals", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP: keep that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.put(number))
    return signals


@contextmanager
def terminable() -> Generator[None]:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt` in the block, as Ctrl-C does, also after
    `listen_for_signals`; an ignored signal stays so. Only the main thread may use it.
    """
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def progress_line(text: str, end: str = "") -> None:
    """Writes in place of the terminal's last line, on stderr; `end` as a newline keeps the line.
    Without a terminal nothing is printed.
    """
    if sys.stderr.isatty():
        line = f"\r\x1b[K{printable(text)}"
        print(line, end=end, file=raw_stream(sys.stderr), flush=True)


def count_steps(steps: Iterable[int], last: int) -> None:
    """Consume the numbers of all `steps`, and show the newest one."""
    for step in steps:
        progress_line(f"step {step} of {last}", "\n" if step == last else "")


@contextmanager
def progress_bar(what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """Yields the function that advances the bar by a number of units. Without a terminal it does
    nothing.
    """
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.progress import Progress

    from rollstream.run.console import TerminalConsole

    with Progress(console=TerminalConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)
