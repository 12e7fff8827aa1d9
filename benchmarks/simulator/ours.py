"""`sim_ours_over_laminar`: trained tokens per second of this project's policy over Laminar's, at
equal lag, with drafts accepted as measured here and over joint draws of the assumed constants.

Each side runs under its own best split of the GPUs at the base values. Lag is measured: work is
taken from ours until its mean lag is at most Laminar's, whose work stays as drawn.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.case import Case, alone
from benchmarks.simulator.runs import LARGE, SetUp, bench, drawn, spread
from rollstream.simulator.constants import CONSTANTS
from rollstream.simulator.policies import policy_of
from rollstream.simulator.results import SimulationResult

LONG = {"steps": 10.0, "steps_skipped": 4.0}
SCALE = 16
TRIES = 5
LAG_SLACK = 1.02  # lags this close are equal
SPLITS = (0.125, 0.25, 0.5, 0.75)
MEDIAN_MIN, WORST_MIN = 1.3, 1.1


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
    constants: Mapping[str, float],
    lag: float,
    waves: float,
) -> Side:
    """Returns a run of `policy` with at most `waves` outstanding whose mean lag is at most `lag`,
    beginning with the `lag` waves that a busy trainer leaves waiting; outstanding work is reduced
    in proportion until that holds. If it never does, the last one.
    """
    waves, tried = min(waves, 1 + lag), 1
    while True:
        on = bench(where, SCALE, {**constants, **LONG, "waves_outstanding": waves})
        side = Side(share, waves, on.run(policy_of(policy), share))
        found = side.result.lag_mean()
        if found <= LAG_SLACK * lag or tried == TRIES:
            return side
        waves, tried = 1 + (waves - 1) * min(0.9, lag / found), tried + 1


def best_split(where: SetUp, policy: str) -> float:
    """Returns the policy's fastest split at the base values."""
    return bench(where, SCALE).best(policy_of(policy), SPLITS)[0]


def at_equal_lag(
    where: SetUp, policy: str, shares: Mapping[str, float], constants: Mapping[str, float]
) -> tuple[Side, Side]:
    """Returns Laminar's run, and that of `policy` with no more lag; `shares` are their splits."""
    waves = constants.get("waves_outstanding", CONSTANTS["waves_outstanding"].value)
    on, share = bench(where, SCALE, {**constants, **LONG}), shares["laminar"]
    laminar = Side(share, waves, on.run(policy_of("laminar"), share))
    lag = laminar.result.lag_mean()
    return laminar, at_lag(where, policy, shares[policy], constants, lag, waves)


def over_laminar(policy: str, constants: Sequence[Mapping[str, float]]) -> list[list[Pair]]:
    """Returns for each of the joint draws, `constants`, Laminar's run and ours in each set-up."""
    names = ("laminar", policy)
    shares = {where: {name: best_split(where, name) for name in names} for where in LARGE}
    return [
        [at_equal_lag(where, policy, shares[where], values) for where in LARGE]
        for values in constants
    ]


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Returns the mean ratio of the speeds over the set-ups of one draw."""
    return statistics.fmean(
        mine.result.tokens_per_s / laminar.result.tokens_per_s for laminar, mine in pairs
    )


def cases(draws: int) -> Iterator[Case]:
    """Yields median and worst of the draws with drafts, and the base values without drafts."""
    found = over_laminar("ours", drawn(draws))
    ratios = [ratio_of(pairs) for pairs in found]
    more = max(
        mine.result.lag_mean() - laminar.result.lag_mean()
        for pairs in found
        for laminar, mine in pairs
    )
    note = (
        f"at equal mean lag as measured (ours at most {more:+.2f} steps over Laminar's); "
        f"{spread(ratios)}, {len(LARGE)} set-ups each, each side under its own best split"
    )
    yield alone(
        "sim_ours_over_laminar", statistics.median(ratios), "×", at_least=MEDIAN_MIN, note=note
    )
    yield alone("sim_ours_over_laminar_worst", min(ratios), "×", at_least=WORST_MIN, note=note)
    plain = ratio_of(over_laminar("ours-drafts", [{}])[0])
    note = "neither side drafts; equal lag, base values"
    yield alone("sim_ours_over_laminar_plain", plain, "×", note=note)
