"""Writes `report.html` of a run, and the pages of several runs and of a simulation."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.explorer.page_file import write_page
from rollstream.look.query.locate import RunLocation
from rollstream.look.report.cards import Detail
from rollstream.look.report.comparison import OverlaidRun, overlay_sheet
from rollstream.look.report.elements import PageElement, element
from rollstream.look.report.history import RunHistory
from rollstream.look.report.learning import NOTHING_LEARNED, what_was_learned
from rollstream.look.report.sheet import run_sheet
from rollstream.look.report.summary import RunSummary
from rollstream.look.report.timeline import simulation_sheet

if TYPE_CHECKING:
    from rollstream.simulator.experiment import PolicyRun

EXPORT_FOLDER = "explorer"
EXPORT_LINK = element(
    "p",
    {"class": "note"},
    element("a", {"href": f"{EXPORT_FOLDER}/index.html"}, "Explore steps, groups and every token"),
    ", from a file host",
)
# The views of the explorer that a report has, if they fit, and the newest steps one by one.
ANSWERED = ("settings", "steps", "questions", "weights", "map/lag", "map/length", "groups")
STEPS_MAX = 64
READY_S = 600.0  # to read the run


def write_report(
    history: RunHistory,
    summary: RunSummary,
    path: Path,
    location: RunLocation | None = None,
    is_typed: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Write the report to `path` (`output_file`), with what queries over the records of the run at
    `location` show, the views of the explorer that fit, and a link to the explorer's static export,
    if one is in `EXPORT_FOLDER` beside it. With `is_typed` the user typed the path, so links are
    followed. `tell` receives what the queries could not read.
    """
    # It and the explorer import DuckDB and pyarrow, which `rollstream run` needs at its end only.
    from rollstream.look.query.session import QuerySession

    learning = NOTHING_LEARNED
    if location is not None:
        try:
            with QuerySession(location, tell) as session:
                learning = what_was_learned(history, session)
        except ConfigurationError as error:  # one odd record can end a query over all of them
            tell(str(error))
    link = [EXPORT_LINK] if (path.parent / EXPORT_FOLDER / "index.html").is_file() else []

    def sheet(detail: Detail) -> list[PageElement]:
        head, *parts = run_sheet(history, summary, learning, detail)
        return [head, *link, *parts]

    title = f"{summary.run or 'run'} · seed {summary.seed} · Rollstream"
    answers = () if location is None else explorer_answers(location)
    write_page(title, sheet, path, is_typed, answers)


def write_overlay(runs: Sequence[OverlaidRun], path: Path, is_typed: bool = False) -> None:
    names = " · ".join(run.name for run in runs)
    title = f"{names} · Rollstream"
    write_page(title, lambda detail: overlay_sheet(runs, detail), path, is_typed)


def write_simulated(runs: Sequence["PolicyRun"], path: Path) -> None:
    write_page("Simulated cluster", lambda detail: simulation_sheet(runs), path, True)


def explorer_answers(location: RunLocation) -> Iterator[tuple[str, bytes]]:
    """Yields the answers of the explorer about a run, the most important first; none if the run is
    not read within `READY_S`.
    """
    from rollstream.look.explorer.serving.routes import AnswerFailed, Explorer

    with Explorer([location], lambda event, line: None, is_static=True) as explorer:
        (run,) = explorer.runs
        until_s = time.monotonic() + READY_S
        while not run.index.progress.complete:
            if run.trouble or time.monotonic() > until_s:
                return
            time.sleep(0.02)
        yield "runs", explorer.answer("runs", {})
        steps = run.index.columns("SELECT DISTINCT step FROM done ORDER BY step DESC")["step"]
        names = [*ANSWERED, *(f"steps/{step}" for step in steps[:STEPS_MAX])]
        for name in names:
            try:
                yield f"r/0/{name}", explorer.answer(f"r/0/{name}", {})
            except (ObjectMissing, WrongRequest, AnswerFailed):
                # The run lacks it, or an odd record makes it impossible.
                continue
