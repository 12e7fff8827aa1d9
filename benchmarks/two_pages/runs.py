"""Short runs of six kinds (`RUNS`), as `rollstream run` makes them, scraped while they live."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

from rollstream.run.metrics.endpoint import endpoint_file
from testbed.own.kinds import RUN_S, KindFailed, kind_line
from testbed.run_process import running, steps_done
from testbed.scraping import Series, endpoint, scrape

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
    """Make the run in `folder`. Raises `KindFailed` if it fails."""
    kind, run = RUNS[title], ScrapedRun(folder)
    line = kind_line(kind, folder)
    output = folder.parent / f"{kind}.txt"
    if "killed" in title:
        with running(line, output) as process:
            _until(process, folder, output, KILLED_STEP, None)
        # The block has killed the supervisor and, with it, its roles.
    with running(line, output) as process:
        _until(process, folder, output, None, run)
        if process.wait(RUN_S):
            raise KindFailed(f"a run of kind {kind} failed:\n{output.read_text()[-3000:]}")
    return run


def _until(
    process: subprocess.Popen[bytes],
    folder: Path,
    output: Path,
    step: int | None,
    run: ScrapedRun | None,
) -> None:
    """Returns when the step is done, or the run is over."""
    give_up = time.monotonic() + RUN_S
    while process.poll() is None and (step is None or steps_done(folder) < step):
        if time.monotonic() > give_up:
            raise KindFailed(f"the run did not end in {RUN_S:g} s:\n{output.read_text()[-3000:]}")
        if run is not None:
            run.series |= _scraped(folder)
        time.sleep(LOOK_S)


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
