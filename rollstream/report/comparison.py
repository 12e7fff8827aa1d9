"""Two runs side by side: which settings differ, and how their curves do. Pure.

Curves are compared step by step over the steps that both have; what only one run measured is left
out, and how many steps were compared is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rollstream.report.history import History

IDENTITY = ("run", "folder")  # differ between any two runs
LAST_SHARE = 5  # "at the end" is the last fifth: single steps are noise

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
"""Metrics of a step, and what they are called."""
EVALUATED: Mapping[str, str] = {
    "accuracy_sampled": "held-out, sampled",
    "accuracy_greedy": "held-out, greedy",
}
"""Metrics of an evaluation, and what they are called."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A dotted key and its value in each run; None where a run has no such key."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure over the `compared` steps of both runs: means over all, and over the last fifth.

    `apart` is the first compared step at which they differ at all, None if they never do.
    """

    name: str
    compared: int
    mean: tuple[float, float]
    last: tuple[float, float]
    apart: int | None
    first: tuple[float, ...]
    second: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two runs."""

    runs: tuple[str, str]
    settings: tuple[Setting, ...]
    outcomes: tuple[Mapping[str, int], Mapping[str, int]]
    curves: tuple[Curve, ...]
    states_apart: int | None
    """First step whose state hashes (masters and optimiser) differ; None if no common step does."""
    states_compared: int

    def line(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def compare(runs: tuple[str, str], first: History, second: History) -> Comparison:
    """Settings, outcomes, curves and state hashes of two runs."""
    states = sorted(first.steps.keys() & second.steps.keys())
    apart = (s for s in states if first.steps[s].state_hash != second.steps[s].state_hash)
    curves = [_curve(CURVES[m], first.metric(m), second.metric(m)) for m in CURVES]
    curves += [_curve(EVALUATED[m], first.evaluated(m), second.evaluated(m)) for m in EVALUATED]
    curves += [
        _curve(f"reward, {task}", first.metric(metric), second.metric(metric))
        for metric, task in tasks_of(first, second)
    ]
    return Comparison(
        runs,
        _settings(first.configuration, second.configuration),
        (first.outcomes(), second.outcomes()),
        tuple(curve for curve in curves if curve),
        next(apart, None),
        len(states),
    )


def tasks_of(*histories: History) -> list[tuple[str, str]]:
    """Metric and task of the rewards by task, where a run mixes several."""
    prefix = "reward_mean/"
    names = {
        name
        for history in histories
        for done in history.steps.values()
        for name in done.metrics
        if name.startswith(prefix)
    }
    return [(name, name.removeprefix(prefix)) for name in sorted(names)]


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Setting, ...]:
    return tuple(
        Setting(key, first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if key not in IDENTITY and first.get(key) != second.get(key)
    )


Points = Sequence[tuple[float, float]]


def _curve(name: str, first: Points, second: Points) -> Curve | None:
    a, b = dict(first), dict(second)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return None
    ours, theirs = tuple(a[step] for step in steps), tuple(b[step] for step in steps)
    tail = max(1, len(steps) // LAST_SHARE)
    return Curve(
        name,
        len(steps),
        (fmean(ours), fmean(theirs)),
        (fmean(ours[-tail:]), fmean(theirs[-tail:])),
        next((int(step) for step in steps if a[step] != b[step]), None),
        ours,
        theirs,
    )
