"""One page for several runs: one chart per metric, in which every run is a line.

Shares, timelines and reasons appear only on the pages of single runs. This page holds the metrics
that can be overlaid, and the settings that differ.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollstream.report import page
from rollstream.report.charts import Chart, Points, Series
from rollstream.report.comparison import CURVES, EVALUATION_CURVES, IDENTITY_SETTINGS, tasks_of
from rollstream.report.history import RunHistory
from rollstream.report.summary import RunSummary
from rollstream.report.write import write_page

RUNS_MAX = 8  # lines with distinct colours


@dataclass(frozen=True, slots=True)
class OverlaidRun:
    """One run of the page, with a name that is distinct on it."""

    name: str
    history: RunHistory
    summary: RunSummary


def write_overlay(runs: Sequence[OverlaidRun], path: Path) -> None:
    """Write the page atomically."""
    write_page(overlay_page(runs), path)


def overlay_page(runs: Sequence[OverlaidRun]) -> str:
    """Returns the page; metrics that no run has are left out."""
    names = " · ".join(run.name for run in runs)
    body = [
        page.heading(f"{len(runs)} runs", names),
        page.wide("Summary", "", _summaries(runs)),
        page.charts(_evaluated(runs)),
        page.charts(_measured(runs)),
        page.charts(_against_time(runs)),
        page.wide("Settings that differ", "", _settings(runs)),
    ]
    return page.page(f"{names} · Rollstream", body)


def _summaries(runs: Sequence[OverlaidRun]) -> str:
    rows = [dict(run.summary.rows()) for run in runs]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[key, *(row.get(key, "–") for row in rows)] for key in keys]
    return page.table(["", *(run.name for run in runs)], cells)


def _lines(
    runs: Sequence[OverlaidRun], points: Callable[[RunHistory], list[tuple[float, float]]]
) -> tuple[Series, ...]:
    return tuple(
        Series(run.name, points(run.history), colour) for colour, run in enumerate(runs, start=1)
    )


def _evaluated(runs: Sequence[OverlaidRun]) -> list[Chart]:
    return [
        Chart(
            name[0].upper() + name[1:],
            _lines(runs, lambda h, m=metric: h.evaluated(m)),
            "by step",
            high=1,
        )
        for metric, name in EVALUATION_CURVES.items()
    ]


def _measured(runs: Sequence[OverlaidRun]) -> list[Chart]:
    named = list(CURVES.items())
    named += [(m, f"reward, {task}") for m, task in tasks_of(*(run.history for run in runs))]
    return [
        Chart(
            name[0].upper() + name[1:],
            _lines(runs, lambda h, m=metric: h.metric(m)),
            "by step",
            ".4g",
            low=None,
        )
        for metric, name in named
    ]


def _against_time(runs: Sequence[OverlaidRun]) -> list[Chart]:
    """Progress per second, beside the other charts' progress per step."""
    rewards = _lines(runs, _reward_by_second)
    return [Chart("Reward by seconds of training", rewards, "since the run's first step", ".4g")]


def _reward_by_second(history: RunHistory) -> list[tuple[float, float]]:
    points: Points = history.metric("reward_mean")
    if not points:
        return []
    started = min(done.time_s - done.metrics.get("seconds", 0) for done in history.steps.values())
    return [(history.steps[int(step)].time_s - started, value) for step, value in points]


def _settings(runs: Sequence[OverlaidRun]) -> str:
    flats = [run.history.configuration for run in runs]
    keys = sorted({key for flat in flats for key in flat if key not in IDENTITY_SETTINGS})
    rows = [
        [key, *(json.dumps(flat.get(key)) for flat in flats)]
        for key in keys
        if any(flat.get(key) != flats[0].get(key) for flat in flats)
    ]
    return page.table(["setting", *(run.name for run in runs)], rows) if rows else "none"
