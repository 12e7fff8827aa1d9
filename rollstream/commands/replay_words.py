"""What a replay says to a person while it works: lines, a step counter, a bar at a terminal."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from streams.records import StepDone


def say(text: str) -> None:
    """Beside the result, to the person."""
    print(f"rollstream: {text}", file=sys.stderr)


def tell_steps(steps: Iterable[StepDone], last: int) -> int:
    """Train them all; returns how many, counted on one line of a terminal."""
    shown, done = sys.stderr.isatty(), 0
    for one in steps:
        done += 1
        if shown:
            end = "\n" if one.step == last else ""
            print(f"\r\x1b[Kstep {one.step} of {last}", end=end, file=sys.stderr, flush=True)
    return done


@contextmanager
def bar(what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """Call with how many more are done; nothing is shown where no terminal is."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)
