"""`sim_ours_over_laminar`: trained tokens per second of this project's policy over Laminar's, at
equal lag, with drafts accepted as measured here and over joint draws of the assumed constants.

Each side runs under its own best split of the GPUs at the base values. Lag is measured: work is
taken from ours until its mean lag is at most Laminar's, whose work stays as drawn. A run is long
enough for lags to settle, so its figures differ from those of ten steps.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.case import Case, alone
from benchmarks.simulator.runs import MIDDLE, SetUp, bench, drawn, spread
from rollstream.simulator.constants import CONSTANTS
from rollstream.simulator.experiment import SimulationSetup
from rollstream.simulator.policies import policy_of
from rollstream.simulator.results import SimulationResult

LONG = {"steps": 14.0, "steps_skipped": 6.0}
SCALE = 8
TRIES = 6
LAG_SLACK = 1.02  # lags this close are equal
SPLITS = (0.125, 0.25, 0.5, 0.75)
MEDIAN_MIN, WORST_MIN = 1.3, 1.1


@dataclass(frozen=True, slots=True)
class Side:
    """A policy's run, and the split and the outstanding waves that gave it."""

    share: float
    waves: float
    result: SimulationResult


def at_lag(
    where: SetUp,
    policy: str,
    share: float,
    constants: Mapping[str, float],
    lag: float,
    waves: float,
) -> Side:
    """Returns the run of `policy` with at most `waves` outstanding whose mean lag is at most `lag`:
    outstanding work is reduced in proportion until that holds. If it never does, the last one.
    """
    for _ in range(TRIES):
        on = bench(where, SCALE, {**constants, **LONG, "waves_outstanding": waves})
        side = Side(share, waves, on.run(policy_of(policy), share))
        found = side.result.lag_mean()
        if found <= LAG_SLACK * lag:
            return side
        waves = 1 + (waves - 1) * min(0.9, lag / found)
    return side  # pyright: ignore[reportPossiblyUnboundVariable]


def best_split(on: SimulationSetup, policy: str) -> float:
    """Returns the fastest split at the base values."""
    return on.best(policy_of(policy), SPLITS)[0]


def ratios(
    where: SetUp, policy: str, shares: Mapping[str, float], constants: Mapping[str, float]
) -> tuple[float, Side, Side]:
    """Returns the ratio of speeds at equal lag, and both sides: Laminar's, then ours."""
    waves = constants.get("waves_outstanding", CONSTANTS["waves_outstanding"].value)
    on = bench(where, SCALE, {**constants, **LONG})
    share = shares["laminar"]
    laminar = Side(share, waves, on.run(policy_of("laminar"), share))
    mine = at_lag(where, policy, shares[policy], constants, laminar.result.lag_mean(), waves)
    return mine.result.tokens_per_s / laminar.result.tokens_per_s, laminar, mine


def cases(draws: int) -> Iterator[Case]:
    """Yields the median and the worst draw with drafts, and the median without."""
    for policy in ("ours", "ours-drafts"):
        shares = {
            where: {
                name: best_split(bench(where, SCALE), name) for name in ("laminar", policy)
            }
            for where in MIDDLE
        }
        found: list[float] = []
        lags: list[float] = []
        for constants in drawn(draws):
            got = [ratios(where, policy, shares[where], constants) for where in MIDDLE]
            found.append(statistics.fmean(ratio for ratio, _, _ in got))
            lags += [
                mine.result.lag_mean() - other.result.lag_mean() for _, other, mine in got
            ]
        note = (
            f"equal mean lag as measured (ours at most {max(lags):+.2f} steps over); "
            f"{spread(found)}; {len(MIDDLE)} set-ups, each side under its own best split"
        )
        median = statistics.median(found)
        if policy == "ours":
            yield alone("sim_ours_over_laminar", median, "×", at_least=MEDIAN_MIN, note=note)
            yield alone("sim_ours_over_laminar_worst", min(found), "×", at_least=WORST_MIN)
        else:
            yield alone("sim_ours_over_laminar_plain", median, "×", note=f"no drafts; {note}")
