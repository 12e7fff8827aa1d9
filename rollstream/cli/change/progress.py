"""Progress output of a replay: a step counter, a progress bar on a terminal."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from rollstream.streams.records import StepDone


def count_steps(steps: Iterable[StepDone], last: int) -> int:
    """Consume all steps, counting them on one terminal line; returns their number."""
    shown, done = sys.stderr.isatty(), 0
    for one in steps:
        done += 1
        if shown:
            end = "\n" if one.step == last else ""
            print(f"\r\x1b[Kstep {one.step} of {last}", end=end, file=sys.stderr, flush=True)
    return done


@contextmanager
def progress_bar(what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """Yields a function that advances a progress bar; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)
