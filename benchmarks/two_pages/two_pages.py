"""`two_pages`: figures that two places of one run show differently beyond their printed rounding,
and numbers without a name, over runs of six kinds. The places are the live view, `/metrics`, the
report, the explorer's pages and answers, the views of `query`, `ls` and `audit`. The note has each
difference with both numbers.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.two_pages.runs import RUNS, ScrapedRun, last_series, make
from testbed.browser import running_browser
from testbed.explorer_server import serving
from testbed.run_driver import steps_done
from testbed.two_pages.pages import page_numbers
from testbed.two_pages.places import ends_of_run, numbers_of_run, scraped_numbers
from testbed.two_pages.shown import ShownNumber, disagreements, resolved, unnamed

QUICK = ("in_flight, killed and resumed",)
NOTED = 12


def cases(quick: bool) -> Iterator[Case]:
    """Yields the number of figures that disagree, over all runs."""
    texts: list[str] = []
    compared = 0
    titles = QUICK if quick else tuple(RUNS)
    for title in titles:
        with tempfile.TemporaryDirectory(prefix="rollstream-two-pages-") as name:
            shown = list(_numbers(make(title, Path(name) / "run")))
        compared += len({(one.figure, one.of) for one in shown if one.figure})
        faults = [one.text() for one in disagreements(shown)]
        faults += [f"no name: {label}" for label in unnamed(shown)]
        print(
            f"{title}: {len(shown)} numbers, {len(faults)} faults",
            *faults,
            sep="\n  ",
            file=sys.stderr,
        )
        texts += [f"{title}: {fault}" for fault in faults]
    note = f"{compared} figures of {len(titles)} runs; {'; '.join(texts[:NOTED])}".removesuffix(
        "; "
    )
    yield alone("two_pages", len(texts), "figures", at_most=0, note=note)


def _numbers(run: ScrapedRun) -> Iterator[ShownNumber]:
    yield from numbers_of_run(run.folder)
    ends = ends_of_run(run.folder)
    steps = steps_done(run.folder)
    for series in last_series(run, steps):
        yield from resolved(scraped_numbers(series), ends)
    with serving([str(run.folder)]) as served, running_browser() as browser:
        shown = page_numbers(browser, f"http://127.0.0.1:{served.port}", steps)
        yield from resolved(list(shown), ends)
