"""`sim_ours_over_laminar`: trained tokens per second of this project's policy over Laminar's, at
equal lag, over joint draws of the assumed constants and of the work.

Three arms: with drafts accepted as measured here (`benchmarks histospec`), with drafts accepted as
RhymeRL measured on its models, and without drafts on either side. Each side runs under its own best
split of the GPUs at the base values. Lag is measured: work is taken from ours until its mean lag is
at most Laminar's, whose work stays as drawn.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.case import Case, alone
from benchmarks.simulator.runs import LARGE, SetUp, bench, drawn
from rollstream.simulator.constants import CONSTANTS
from rollstream.simulator.policies import policy_of
from rollstream.simulator.results import SimulationResult

LONG = {"steps": 10.0, "steps_skipped": 4.0}
SCALE = 16
TRIES = 5
LAG_SLACK = 1.02  # lags this close are equal
SPLITS = (0.125, 0.25, 0.5, 0.75)
MEDIAN_MIN, WORST_MIN = 1.3, 1.1
RATES = 0.855, 0.945
"""Chance that a drafted token is accepted if all before it are, at which RhymeRL's windows (2, 2
more after a fully accepted draft, at most 32) accept the 65 to 79 % of its paper.
"""


@dataclass(frozen=True, slots=True)
class Side:
    """A policy's run, and the split and the outstanding waves that gave it."""

    share: float
    waves: float
    result: SimulationResult


Pair = tuple[Side, Side]


def at_lag(
    where: SetUp,
    policy: str,
    share: float,
    drawn_: "Drawn",
    lag: float,
    waves: float,
) -> Side:
    """Returns a run of `policy` with at most `waves` outstanding whose mean lag is at most `lag`,
    beginning with the `lag` waves that a busy trainer leaves waiting; outstanding work is reduced
    in proportion until that holds. If it never does, the last one.
    """
    waves, tried = min(waves, 1 + lag), 1
    while True:
        constants = {**drawn_.constants, **LONG, "waves_outstanding": waves}
        on = bench(where, SCALE, constants, drawn_.seed)
        side = Side(share, waves, on.run(policy_of(policy), share))
        found = side.result.lag_mean()
        if found <= LAG_SLACK * lag or tried == TRIES:
            return side
        waves, tried = 1 + (waves - 1) * min(0.9, lag / found), tried + 1


def best_split(where: SetUp, policy: str, constants: Mapping[str, float]) -> float:
    """Returns the policy's fastest split at these values."""
    return bench(where, SCALE, constants).best(policy_of(policy), SPLITS)[0]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One joint draw of the assumed constants, and the seed of its lengths."""

    constants: Mapping[str, float]
    seed: int


def as_published(draws: Sequence[Drawn]) -> list[Drawn]:
    """Returns the draws with drafts accepted as RhymeRL measured."""
    rates = np.random.default_rng(1).uniform(*RATES, len(draws)).tolist()
    return [
        Drawn({**one.constants, "draft_rate": rate}, one.seed)
        for one, rate in zip(draws, rates, strict=True)
    ]


def laminar_runs(draws: Sequence[Drawn]) -> list[list[Side]]:
    """Returns Laminar's run in each set-up, draw by draw."""
    shares = {where: best_split(where, "laminar", {}) for where in LARGE}
    found: list[list[Side]] = []
    for one in draws:
        waves = one.constants.get("waves_outstanding", CONSTANTS["waves_outstanding"].value)
        constants, policy = {**one.constants, **LONG}, policy_of("laminar")
        runs = {
            where: bench(where, SCALE, constants, one.seed).run(policy, shares[where])
            for where in LARGE
        }
        found.append([Side(shares[where], waves, run) for where, run in runs.items()])
    return found


def over_laminar(
    policy: str,
    draws: Sequence[Drawn],
    laminar: Sequence[Sequence[Side]],
    base: Mapping[str, float],
) -> list[list[Pair]]:
    """Returns for each draw Laminar's run and ours with no more lag, in each set-up. `base` are the
    values at which our split is chosen.
    """
    shares = {where: best_split(where, policy, base) for where in LARGE}
    return [
        [
            (other, at_lag(where, policy, shares[where], one, other.result.lag_mean(), other.waves))
            for where, other in zip(LARGE, others, strict=True)
        ]
        for one, others in zip(draws, laminar, strict=True)
    ]


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Returns the mean ratio of the speeds over the set-ups of one draw."""
    return statistics.fmean(
        mine.result.tokens_per_s / laminar.result.tokens_per_s for laminar, mine in pairs
    )


def cases(draws: int) -> Iterator[Case]:
    """Yields median and worst of the draws in each arm; goals are for drafts as measured here."""
    joint = [Drawn({}, 0), *(Drawn(values, n + 1) for n, values in enumerate(drawn(draws)))]
    laminar = laminar_runs(joint)
    rate = {"draft_rate": statistics.fmean(RATES)}
    arms = {
        "sim_ours_over_laminar": over_laminar("ours", joint, laminar, {}),
        "sim_ours_over_laminar_published": over_laminar("ours", as_published(joint), laminar, rate),
        "sim_ours_over_laminar_plain": over_laminar("ours-drafts", joint, laminar, {}),
    }
    words = ("drafts as measured here", "drafts as RhymeRL measured", "no drafts")
    for (name, found), text in zip(arms.items(), words, strict=True):
        has_goal = name == "sim_ours_over_laminar"
        ratios = [ratio_of(pairs) for pairs in found[1:]]
        note = f"{text}; {_note(found)}"
        at_least = MEDIAN_MIN if has_goal else None
        yield alone(name, statistics.median(ratios), "×", at_least=at_least, note=note)
        at_least = WORST_MIN if has_goal else None
        yield alone(f"{name}_worst", min(ratios), "×", at_least=at_least)


def _note(found: Sequence[Sequence[Pair]]) -> str:
    """Returns the base values' ratios by set-up, how equal the lags are, and the draws' spread."""
    more = max(
        mine.result.lag_mean() - laminar.result.lag_mean()
        for pairs in found
        for laminar, mine in pairs
    )
    base = ", ".join(
        f"{where[0]} {mine.result.tokens_per_s / laminar.result.tokens_per_s:.2f} (split "
        f"{mine.share:g} against {laminar.share:g}, lag {mine.result.lag_mean():.1f} against "
        f"{laminar.result.lag_mean():.1f})"
        for where, (laminar, mine) in zip(LARGE, found[0], strict=True)
    )
    ratios = sorted(ratio_of(pairs) for pairs in found[1:])
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    return (
        f"base {ratio_of(found[0]):.2f}: {base}; lag at most {more:+.2f} steps more; draws {each}"
    )
