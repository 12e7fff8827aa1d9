"""Arms against their references, in pairs of rows of one seed (`comparisons`): both runs share warm
model, prompts and random numbers. Nothing is run here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rollstream.look.query.intervals import (
    Equivalence,
    PairedDifference,
    equivalence,
    paired_difference,
)
from studies.evidence.arms import ARMS, WORLDS
from studies.evidence.rows import EvidenceRow, by_seed

SEEDS_MIN = 5  # pairs below which nothing is decided
MARGIN = 0.02


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

    @property
    def test(self) -> Equivalence | None:
        """The two one-sided tests of |difference| < `MARGIN`; None below two seeds."""
        found = self.difference
        return None if found is None else equivalence(found, MARGIN)

    @property
    def farthest(self) -> float | None:
        """The largest absolute end of the 90 % interval; None below two seeds."""
        test = self.test
        return None if test is None else max(abs(test.low), abs(test.high))

    @property
    def mean(self) -> float | None:
        """The mean difference; None without a pair."""
        return fmean(b.accuracy - a.accuracy for a, b in self.pairs) if self.pairs else None

    @property
    def verdict(self) -> str:
        """What the pairs show: the sign of a difference (95 %), equivalence within the margin, both
        or neither.
        """
        found, test = self.difference, self.test
        if found is None or test is None or len(self.pairs) < SEEDS_MIN:
            return "not decided: too few seeds"
        shown: list[str] = []
        if found.p < 1 - found.confidence:
            shown.append("higher" if found.difference > 0 else "lower")
        if test.is_shown:
            shown.append(f"within ±{MARGIN:g}")
        return ", ".join(shown) or "not significant, not equivalent"

    def text(self) -> str:
        """One line: difference, 90 % interval, power, achieved lag and ESS, seeds."""
        name, seeds = f"{self.world} {self.arm}", count(len(self.pairs), "seed")
        if not self.pairs:
            return f"{name}: {seeds}"
        rows = [row for _, row in self.pairs]
        had = f"lag {fmean(r.lag for r in rows):.2f}, ESS {fmean(r.ess for r in rows):.2f}"
        found, test = self.difference, self.test
        if found is None or test is None:
            return f"{name}: {self.mean:+.4f}, no interval, {had}, {seeds}"
        power = f"power {test.power:.0%} for ±{MARGIN:g}, {found.detectable:.3f} detectable"
        interval = f"{test.low:+.4f} to {test.high:+.4f}"
        return f"{name}: {found.difference:+.4f} ({interval}), {had}, {power}, {seeds}"

    def table_row(self) -> str:
        """A row of the page's table (`TABLE_HEAD`)."""
        reference = ARMS[self.arm].reference
        rows = [row for _, row in self.pairs]
        cells = [self.world, f"`{self.arm}`", f"`{reference}`", str(len(rows))]
        cells += [f"{fmean(r.lag for r in rows):.1f}", f"{fmean(r.ess for r in rows):.2f}"]
        cells += [f"{fmean(a.accuracy for a, _ in self.pairs):.3f}", f"{self.mean:+.3f}"]
        found, test = self.difference, self.test
        if found is None or test is None:
            cells += ["", "", ""]
        else:
            cells += [f"{test.low:+.3f} to {test.high:+.3f}", f"{test.power:.0%}"]
            cells += [f"{found.detectable:.3f}"]
        return f"| {' | '.join([*cells, self.verdict])} |"


TABLE_HEAD = (
    "| world | arm | against | seeds | lag | ESS | accuracy against | difference | 90 % interval"
    " | power for ±.02 | detectable | shown |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


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


def table(rows: Sequence[EvidenceRow]) -> list[str]:
    """Returns the lines of the table of all comparisons that have a pair."""
    arms = [arm.name for arm in ARMS.values() if arm.reference]
    return [*TABLE_HEAD, *(one.table_row() for one in comparisons(rows, arms) if one.pairs)]


def _comparable(
    pairs: Sequence[tuple[EvidenceRow, EvidenceRow]],
) -> tuple[tuple[EvidenceRow, EvidenceRow], ...]:
    """Returns the pairs of runs with the same held-out prompts and number of tokens."""
    return tuple(
        (a, b) for a, b in pairs if (a.prompts, a.tokens_wanted) == (b.prompts, b.tokens_wanted)
    )


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
