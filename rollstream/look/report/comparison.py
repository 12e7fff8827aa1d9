"""Compares two runs (`rollstream diff`), and draws several on one sheet, the overlay. Curves
and hashes are compared over the steps that both have.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rollstream.look.report.cards import FULL_DETAIL, Detail, card, charts, heading, table
from rollstream.look.report.chart import Chart, Points, Series
from rollstream.look.report.elements import PageElement
from rollstream.look.report.history import RunHistory
from rollstream.look.report.summary import RunSummary
from rollstream.run.config.errors import printable_value
from rollstream.streams.ledger_records import StateHashes, first_difference

# They differ between any two runs.
IDENTITY_SETTINGS = ("run", "folder")
# The last fifth of the steps is averaged, because single steps are noisy.
LAST_FRACTION = 5

# The metrics of a step that are compared and drawn, with their display names.
CURVES: Mapping[str, str] = {
    "reward_mean": "reward",
    "length_median": "length, median",
    "length_p99": "length, p99",
    "loss": "loss",
    "entropy": "entropy",
    "kl": "KL estimate",
    "ess": "effective sample size",
    "value_loss": "value loss",
    "explained_variance": "explained variance of the returns",
    "lag_finish_mean": "lag at finish",
    "lag_consumed_mean": "lag when trained",
    "tokens_trained": "tokens per step",
    "seconds": "seconds per step",
    "wait_s": "seconds waiting per step",
}


@dataclass(frozen=True, slots=True)
class RunCurve:
    """`metric` is a metric of the trainer's steps or, if `is_evaluated`, of the evaluations; `name`
    its display name.
    """

    name: str
    metric: str
    is_evaluated: bool = False

    def points(self, history: RunHistory) -> list[tuple[float, float]]:
        read = history.evaluated if self.is_evaluated else history.metric
        return read(self.metric)


EVALUATIONS = (
    RunCurve("held-out, sampled", "accuracy_sampled", True),
    RunCurve("held-out, greedy", "accuracy_greedy", True),
)


@dataclass(frozen=True, slots=True)
class SettingDifference:
    key: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """One metric of two runs over the `compared` steps at which both have it. `first` and `second`
    are the runs' values at these steps; `mean` and `last` are, for each run, the means over all of
    them and over the last fifth. `apart` is the first step at which the values differ, or None.
    """

    name: str
    compared: int
    mean: tuple[float, float]
    last: tuple[float, float]
    apart: int | None
    first: tuple[float, ...]
    second: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """`outcomes` is, for each run, the number of groups by ending; `states_compared` is the number
    of steps that both runs have.
    """

    runs: tuple[str, str]
    settings: tuple[SettingDifference, ...]
    outcomes: tuple[Mapping[str, int], Mapping[str, int]]
    curves: tuple[CurveComparison, ...]
    states_apart: int | None
    """The first common step with different state hashes (of the fp32 weights and the optimiser or,
    if a run does not record these, of the published tensors), or None.
    """
    states_compared: int

    def line(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(runs: tuple[str, str], first: RunHistory, second: RunHistory) -> RunComparison:
    states = sorted(first.steps.keys() & second.steps.keys())
    curves = [
        _curve(curve.name, curve.points(first), curve.points(second))
        for curve in (*curves_of(first, second), *EVALUATIONS)
    ]
    return RunComparison(
        runs,
        tuple(
            SettingDifference(key, *values)
            for key, values in _settings_apart(first.configuration, second.configuration)
        ),
        (first.outcomes, second.outcomes),
        tuple(curve for curve in curves if curve),
        first_difference([_hashes(first), _hashes(second)]),
        len(states),
    )


def _hashes(history: RunHistory) -> dict[int, StateHashes]:
    return {step: done.hashes for step, done in history.steps.items()}


def tasks_of(*histories: RunHistory) -> list[tuple[str, str]]:
    """Returns, for runs of a mixture of tasks, the metric of each task's mean reward, as (metric,
    task); [] if none of the runs mixes tasks.
    """
    prefix = "reward_mean/"
    names = {
        name
        for history in histories
        for done in history.steps.values()
        for name in done.metrics
        if name.startswith(prefix)
    }
    return [(name, name.removeprefix(prefix)) for name in sorted(names)]


def curves_of(*histories: RunHistory) -> list[RunCurve]:
    tasks = (RunCurve(f"reward, {task}", metric) for metric, task in tasks_of(*histories))
    return [*(RunCurve(name, metric) for metric, name in CURVES.items()), *tasks]


def _settings_apart(*runs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for key in sorted({key for run in runs for key in run if key not in IDENTITY_SETTINGS}):
        values = tuple(run.get(key) for run in runs)
        if any(value != values[0] for value in values):
            yield key, values


def _curve(name: str, first: Points, second: Points) -> CurveComparison | None:
    a, b = dict(first), dict(second)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return None
    ours, theirs = tuple(a[step] for step in steps), tuple(b[step] for step in steps)
    tail = max(1, len(steps) // LAST_FRACTION)
    return CurveComparison(
        name,
        len(steps),
        (fmean(ours), fmean(theirs)),
        (fmean(ours[-tail:]), fmean(theirs[-tail:])),
        next((int(step) for step in steps if a[step] != b[step]), None),
        ours,
        theirs,
    )


# Most runs on one page: lines with distinct colours.
RUNS_MAX = 8


@dataclass(frozen=True, slots=True)
class OverlaidRun:
    name: str
    history: RunHistory
    summary: RunSummary


def overlay_sheet(runs: Sequence[OverlaidRun], detail: Detail = FULL_DETAIL) -> list[PageElement]:
    """Returns the parts of the page of several runs."""
    return [
        heading(f"{len(runs)} runs", " · ".join(run.name for run in runs)),
        card("Summary", "", _summaries(runs)),
        *overlay_charts(runs, detail),
        card("Settings that differ", "", _settings_table(runs)),
    ]


def overlay_charts(runs: Sequence[OverlaidRun], detail: Detail = FULL_DETAIL) -> list[PageElement]:
    curves = curves_of(*(run.history for run in runs))
    return [
        *charts([_chart(runs, curve) for curve in EVALUATIONS], detail),
        *charts([*(_chart(runs, curve) for curve in curves), *_against_time(runs)], detail),
    ]


def _summaries(runs: Sequence[OverlaidRun]) -> PageElement:
    rows = [dict(run.summary.rows()) for run in runs]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[key, *(row.get(key, "–") for row in rows)] for key in keys]
    return table(["", *(run.name for run in runs)], cells)


def _lines(
    runs: Sequence[OverlaidRun], points: Callable[[RunHistory], list[tuple[float, float]]]
) -> tuple[Series, ...]:
    return tuple(
        Series(run.name, points(run.history), colour) for colour, run in enumerate(runs, start=1)
    )


def _chart(runs: Sequence[OverlaidRun], curve: RunCurve) -> Chart:
    lines = _lines(runs, curve.points)
    title = curve.name[0].upper() + curve.name[1:]
    if curve.is_evaluated:
        return Chart(title, lines, "by step", high=1)
    return Chart(title, lines, "by step", ".4g", low=None)


def _against_time(runs: Sequence[OverlaidRun]) -> list[Chart]:
    rewards = _lines(runs, _reward_by_second)
    return [Chart("Reward by seconds of training", rewards, "since the run's first step", ".4g")]


def _reward_by_second(history: RunHistory) -> list[tuple[float, float]]:
    points: Points = history.metric("reward_mean")
    if not points:
        return []
    started = min(done.time_s - done.metrics.get("seconds", 0) for done in history.steps.values())
    return [(history.steps[int(step)].time_s - started, value) for step, value in points]


def _settings_table(runs: Sequence[OverlaidRun]) -> PageElement | str:
    differences = _settings_apart(*(run.history.configuration for run in runs))
    rows = [
        [key, *(printable_value(key, value, json.dumps) for value in values)]
        for key, values in differences
    ]
    return table(["setting", *(run.name for run in runs)], rows) if rows else "none"
