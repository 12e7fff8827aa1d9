"""What the committed runs say (`rows.py`): paired differences of held-out accuracy between arms,
recounted from the rows, each with its interval, power and number of seeds. Nothing is run here.

A seed is one pair: both arms share warm model, prompts and random numbers. A case is decided with
`SEEDS_MIN` pairs or more; below it prints what there is and says that it is not decided.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

import numpy as np
from numpy.typing import NDArray

from benchmarks.case import Case, alone
from benchmarks.evidence.arms import ARMS, LAGS, STRESSES, WORLDS
from benchmarks.evidence.rows import EvidenceRow, by_seed, read_rows, recounted
from rollstream.analysis.intervals import (
    PairedDifference,
    bootstrap_interval,
    equivalence,
    paired_difference,
)

SEEDS_MIN = 5
MARGIN = 0.02
COLLAPSE = -0.2  # a run that ends so far below its reference has collapsed
COLLAPSED_MIN = 5  # runs of each kind, below which the area under the curve is not decided


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm against its reference in one world: the pairs of rows of the seeds that both have."""

    world: str
    arm: str
    pairs: tuple[tuple[EvidenceRow, EvidenceRow], ...]

    @property
    def difference(self) -> PairedDifference | None:
        """The paired difference of accuracy, arm − reference; None below two seeds."""
        if len(self.pairs) < 2:
            return None
        return paired_difference(
            [a.accuracy for a, _ in self.pairs], [b.accuracy for _, b in self.pairs]
        )

    def text(self) -> str:
        """One line: difference, 90 % interval, power, achieved lag and ESS, seeds."""
        name, seeds = f"{self.world} {self.arm}", _count(len(self.pairs), "seed")
        if not self.pairs:
            return f"{name}: {seeds}"
        rows = [row for _, row in self.pairs]
        had = f"lag {fmean(r.lag for r in rows):.2f}, ESS {fmean(r.ess for r in rows):.2f}"
        found = self.difference
        if found is None:
            ((a, b),) = self.pairs
            return f"{name}: {b.accuracy - a.accuracy:+.4f}, no interval, {had}, {seeds}"
        test = equivalence(found, MARGIN)
        power = f"power {test.power:.0%} for ±{MARGIN:g}, {found.detectable:.3f} detectable"
        interval = f"{test.low:+.4f} to {test.high:+.4f}"
        return f"{name}: {found.difference:+.4f} ({interval}), {had}, {power}, {seeds}"


def cases(quick: bool) -> Iterator[Case]:
    """Yields the cases from the committed rows; `quick` makes no difference."""
    rows = list(read_rows())
    wrong = [f"{r.world} {r.arm} {r.seed}: {what}" for r in rows if (what := recounted(r))]
    note = f"of {_count(len(rows), 'row')}" + (f"; {wrong[0]}" if wrong else "")
    case = alone("evidence_recount", len(wrong), "rows", at_most=0.0, note=note)
    yield _decided(case, [] if rows else ["no rows"])
    yield lag_difference(rows)
    yield stress("stress_uncorrected", rows, at_most=COLLAPSE)
    yield stress("stress_default", rows, at_least=-MARGIN)
    yield paired_share(rows)
    yield auroc(rows)


def comparisons(rows: Sequence[EvidenceRow], arms: Sequence[str]) -> list[Comparison]:
    """Returns the comparison of each of these arms with its reference, in each world."""
    found: list[Comparison] = []
    for world in WORLDS:
        for arm in arms:
            reference = by_seed(rows, world, ARMS[arm].reference)
            other = by_seed(rows, world, arm)
            seeds = sorted(reference.keys() & other.keys())
            pairs = tuple((reference[seed], other[seed]) for seed in seeds)
            found.append(Comparison(world, arm, _comparable(pairs)))
    return found


def _comparable(
    pairs: Sequence[tuple[EvidenceRow, EvidenceRow]],
) -> tuple[tuple[EvidenceRow, EvidenceRow], ...]:
    """Returns the pairs of runs with the same held-out prompts and number of tokens."""
    return tuple(
        (a, b) for a, b in pairs if (a.prompts, a.tokens_wanted) == (b.prompts, b.tokens_wanted)
    )


def lag_difference(rows: Sequence[EvidenceRow]) -> Case:
    """The largest absolute end of the 90 % intervals over worlds and arms with a lag of 8."""
    found = comparisons(rows, [arm.name for arm in LAGS if arm.reference])
    ends = [_farthest(one.difference) for one in found if one.difference is not None]
    value = max(ends, default=math.nan)
    note = "; ".join(one.text() for one in found)
    case = alone("lag8_difference", value, "accuracy", at_most=MARGIN, note=note)
    few = {one.world for one in found if len(one.pairs) < SEEDS_MIN}
    worlds = f"worlds {len(WORLDS) - len(few)} of {len(WORLDS)}"
    return _decided(case, [*_too_few(found), worlds] if few else [])


def _farthest(found: PairedDifference) -> float:
    test = equivalence(found, MARGIN)
    return max(abs(test.low), abs(test.high))


def stress(
    name: str,
    rows: Sequence[EvidenceRow],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Case:
    """The mean difference of a stressed arm to the same stress without lag: of the worlds that have
    such runs the worst, for an arm that must collapse the best.
    """
    found = comparisons(rows, [name])
    means = [fmean(b.accuracy - a.accuracy for a, b in one.pairs) for one in found if one.pairs]
    value = (min if at_least is not None else max)(means, default=math.nan)
    others = [arm.name for arm in STRESSES if arm.reference and arm.name != name]
    texts = [*found, *(one for one in comparisons(rows, others) if one.pairs)]
    note = "; ".join(one.text() for one in texts)
    case = alone(name, value, "accuracy", at_least=at_least, at_most=at_most, note=note)
    return _decided(case, _too_few(found))


def paired_share(rows: Sequence[EvidenceRow]) -> Case:
    """The variance of the paired differences over that of unpaired ones, which is the sum of both
    arms' variances; the mean over the arms with lag, of those with enough seeds if there are any.
    """
    found = comparisons(rows, [arm.name for arm in LAGS if arm.reference])
    seeds = max(len(one.pairs) for one in found)
    used = [one for one in found if len(one.pairs) >= max(2, min(seeds, SEEDS_MIN))]
    shares: list[float] = []
    for one in used:
        first, second = zip(*((a.accuracy, b.accuracy) for a, b in one.pairs), strict=True)
        apart = variance(first) + variance(second)
        together = variance([b - a for a, b in zip(first, second, strict=True)])
        shares.append(together / apart if apart else math.nan)
    each = ", ".join(
        f"{one.world} {one.arm} {share:.2f} of {_count(len(one.pairs), 'seed')}"
        for one, share in zip(used, shares, strict=True)
    )
    value = fmean(shares) if shares else math.nan
    note = f"unpaired: 1; {each or 'no pairs'}"
    case = alone("paired_variance", value, "share", at_most=0.5, note=note)
    return _decided(case, _too_few(used))


def auroc(rows: Sequence[EvidenceRow]) -> Case:
    """The area under the ROC curve of the ESS over a run's first half of steps as a predictor of
    its collapse, over all runs of stress that have a reference, with a bootstrap interval by run.
    """
    found = comparisons(rows, [arm.name for arm in STRESSES if arm.reference])
    pairs = [pair for one in found for pair in one.pairs]
    collapsed = np.array([b.accuracy - a.accuracy <= COLLAPSE for a, b in pairs], bool)
    risks = np.array([-early_ess(b) for _, b in pairs], np.float64)
    value = area(risks, collapsed)
    low, high = (
        bootstrap_interval(len(pairs), lambda drawn: area(risks[drawn], collapsed[drawn]))
        if pairs and not math.isnan(value)
        else (math.nan, math.nan)
    )
    down, up = int(collapsed.sum()), int((~collapsed).sum())
    note = f"95 % interval {low:.2f} to {high:.2f}; {down} runs collapsed, {up} did not"
    case = alone("ess_auroc", value, "area", at_least=0.9, note=note)
    few = min(down, up) < COLLAPSED_MIN
    return _decided(case, [f"fewer than {COLLAPSED_MIN} runs of a kind"] if few else [])


def early_ess(row: EvidenceRow) -> float:
    """Returns the mean ESS over the first half of a run's steps."""
    values = row.steps["ess"]
    known = [value for value in values[: max(1, len(values) // 2)] if value is not None]
    return fmean(known) if known else 0.0


def area(risks: NDArray[np.float64], collapsed: NDArray[np.bool_]) -> float:
    """Returns the share of pairs (collapsed, not collapsed) in which the collapsed run has the
    higher risk, ties as a half (Mann and Whitney, 1947); nan without such a pair.
    """
    above, below = risks[collapsed], risks[~collapsed]
    if not len(above) or not len(below):
        return math.nan
    apart = above[:, None] - below[None, :]
    return float(((apart > 0) + 0.5 * (apart == 0)).mean())


def _too_few(found: Sequence[Comparison]) -> list[str]:
    """Returns what is missing if a comparison that has pairs has too few seeds, or none has any."""
    seeds = min((len(one.pairs) for one in found if one.pairs), default=0)
    return [f"{_count(seeds, 'seed')} of {SEEDS_MIN}"] if seeds < SEEDS_MIN else []


def _decided(case: Case, missing: Sequence[str]) -> Case:
    """Returns the case, without a verdict where something is missing: it is never met then."""
    if not missing and not math.isnan(case.value):
        return case
    why = ", ".join(missing) or "no data"
    return replace(case, met=None, note=f"NOT DECIDED ({why}); {case.note}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
