"""Short runs of six kinds (`RUNS`), as `rollstream run` makes them, scraped while they live."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

from rollstream.run.metrics.endpoint import endpoint_file
from testbed.own.kinds import RUN_S, run_of_kind
from testbed.scraping import Series, endpoint, scrape
from testbed.waiting import let_pass

LOOK_S = 0.2
KILLED_STEP = 2
# Of `testbed/own/kinds.py`; the first one is killed and resumed.
RUNS: Mapping[str, str] = {
    "in_flight, killed and resumed": "evaluated",
    "keep_version": "kept_version",
    "LoRA": "adapters",
    "critic": "critic",
    "agents": "agents",
    "two ranks": "ranks",
}


@dataclass(slots=True)
class ScrapedRun:
    """A run that is over, and the last scrape of each process that its trainer's last step
    precedes.
    """

    folder: Path
    series: dict[str, Series] = field(default_factory=dict[str, Series])


def make(title: str, folder: Path) -> ScrapedRun:
    """Make the run in `folder`. Raises `RunFailed` if it fails."""
    scraped = ScrapedRun(folder)
    with run_of_kind(RUNS[title], folder) as run:
        run.start()
        if "killed" in title:
            run.wait_for_step(KILLED_STEP, RUN_S)
            run.newest().kill()
            run.start()
        give_up = time.monotonic() + RUN_S
        while not run.newest().is_over and time.monotonic() < give_up:
            scraped.series |= _scraped(folder)
            let_pass(LOOK_S)
        run.newest().wait(bound_s=1.0)
    return scraped


def _scraped(folder: Path) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for path in endpoint_file(folder, "x").parent.glob("*.json"):
        # A process may end meanwhile.
        with suppress(OSError, URLError, ValueError, AssertionError):
            series[path.stem] = scrape(endpoint(folder, path.stem)["url"])
    return series


def last_series(run: ScrapedRun, steps: int) -> Iterator[Series]:
    """Yields the scrapes that show the run's last step: an earlier one is of another moment."""
    for series in run.series.values():
        shown: Sequence[float] = [
            value
            for name in ("rollstream_trainer_step", "rollstream_run_step")
            for _, value in series.get(name, ())
        ]
        if shown and max(shown) == steps:
            yield series
