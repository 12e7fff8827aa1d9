"""Compares two runs: settings, outcomes, curves and state hashes. Pure.

Curves are compared over the steps that both runs have; the number of compared steps is reported.
Metrics that only one run measured are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rollstream.report.history import RunHistory

IDENTITY_SETTINGS = ("run", "folder")  # differ between any two runs, so they are not compared
LAST_FRACTION = 5  # the value "at the end" is the mean of the last fifth: single steps are noisy

CURVES: Mapping[str, str] = {
    "reward_mean": "reward",
    "length_median": "length, median",
    "length_p99": "length, p99",
    "loss": "loss",
    "entropy": "entropy",
    "kl": "KL estimate",
    "ess": "effective sample size",
    "lag_finish_mean": "lag at finish",
    "lag_consumed_mean": "lag when trained",
    "tokens_trained": "tokens per step",
    "seconds": "seconds per step",
    "wait_s": "seconds waiting per step",
}
"""Metrics of a step and their display names."""
EVALUATION_CURVES: Mapping[str, str] = {
    "accuracy_sampled": "held-out, sampled",
    "accuracy_greedy": "held-out, greedy",
}
"""Metrics of an evaluation and their display names."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A dotted key and its value in each run; None if a run lacks the key."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """One metric over the `compared` common steps: means over all of them and over the last fifth.

    `apart` is the first compared step at which the runs differ, None if they never do.
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
    """The differences between two runs."""

    runs: tuple[str, str]
    settings: tuple[SettingDifference, ...]
    outcomes: tuple[Mapping[str, int], Mapping[str, int]]
    curves: tuple[CurveComparison, ...]
    states_apart: int | None
    """First step whose state hashes (masters and optimiser) differ; None if no common step does."""
    states_compared: int

    def line(self) -> dict[str, Any]:
        """Returns the comparison as a JSON object."""
        return asdict(self)


def compare_runs(runs: tuple[str, str], first: RunHistory, second: RunHistory) -> RunComparison:
    """Compare settings, outcomes, curves and state hashes of two runs."""
    states = sorted(first.steps.keys() & second.steps.keys())
    apart = (s for s in states if first.steps[s].state_hash != second.steps[s].state_hash)
    curves = [_curve(CURVES[m], first.metric(m), second.metric(m)) for m in CURVES]
    curves += [
        _curve(EVALUATION_CURVES[m], first.evaluated(m), second.evaluated(m))
        for m in EVALUATION_CURVES
    ]
    curves += [
        _curve(f"reward, {task}", first.metric(metric), second.metric(metric))
        for metric, task in tasks_of(first, second)
    ]
    return RunComparison(
        runs,
        _settings(first.configuration, second.configuration),
        (first.outcomes(), second.outcomes()),
        tuple(curve for curve in curves if curve),
        next(apart, None),
        len(states),
    )


def tasks_of(*histories: RunHistory) -> list[tuple[str, str]]:
    """Returns (metric, task) of the rewards by task, if a run mixes several tasks."""
    prefix = "reward_mean/"
    names = {
        name
        for history in histories
        for done in history.steps.values()
        for name in done.metrics
        if name.startswith(prefix)
    }
    return [(name, name.removeprefix(prefix)) for name in sorted(names)]


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[SettingDifference, ...]:
    return tuple(
        SettingDifference(key, first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if key not in IDENTITY_SETTINGS and first.get(key) != second.get(key)
    )


CurvePoints = Sequence[tuple[float, float]]


def _curve(name: str, first: CurvePoints, second: CurvePoints) -> CurveComparison | None:
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
