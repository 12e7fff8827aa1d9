"""Analyses what a run learned, for the report and `rollstream diff`: sigmoid fits of its reward
curves (`reward_fits`), and what the views `bias` and `pass_at_k` show (`what_was_learned`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rollstream.look.query.sigmoid_fit import Estimate, SigmoidFit, fit_sigmoid
from rollstream.look.report.cards import card, group_digits, table
from rollstream.look.report.chart import Chart, Series
from rollstream.look.report.elements import PageElement
from rollstream.look.report.history import RunHistory

if TYPE_CHECKING:  # imports DuckDB
    from rollstream.look.query.session import QuerySession

FITTED = (("held-out, sampled", "accuracy_sampled", True), ("reward", "reward_mean", False))
K_SHOWN = (1, 2, 4, 8, 16)
MEASURES = {
    "length": "length, tokens",
    "prompt_length": "mean length of the prompt's group",
    "difficulty": "difficulty (1 − mean reward of the group)",
}
FATES = ("admitted", "finished", "trained", "dropped", "filtered")


@dataclass(frozen=True, slots=True)
class RewardFit:
    """A fit of one curve over the tokens that were trained before each point. `ahead` is the mean
    absolute error of the second half of the points, predicted from a fit of the first half; None
    where a half has too few.
    """

    name: str
    fit: SigmoidFit
    ahead: float | None

    def line(self) -> dict[str, Any]:
        return asdict(self)

    def row(self) -> tuple[str, ...]:
        fit = self.fit
        ahead = "–" if self.ahead is None else f"{self.ahead:.3f}"
        if not fit.is_determined:
            return (self.name, "not determined", f"{fit.start.value:.3f}", "–", "–", ahead)
        middle = group_digits(fit.midpoint.value)
        return (
            self.name,
            _bounded(fit.asymptote),
            _bounded(fit.start),
            _bounded(fit.steepness, ".2f"),
            middle,
            ahead,
        )


FIT_HEAD = ("curve", "asymptote A", "start R0", "steepness B", "Cmid, tokens", "error ahead")


def reward_fits(history: RunHistory) -> list[RewardFit]:
    """Returns the fits of the curves that have enough points."""
    # The reward of a step is that of its trained trajectories; the rest are in no step.
    trained = dict(history.metric("tokens_trained"))
    fits: list[RewardFit] = []
    for name, metric, is_evaluated in FITTED:
        read = history.evaluated if is_evaluated else history.metric
        points = [
            (sum(n for step, n in trained.items() if step <= at), value)
            for at, value in read(metric)
        ]
        if fit := _fitted(points):
            fits.append(RewardFit(name, fit, _error_ahead(points)))
    return fits


def _fitted(points: Sequence[tuple[float, float]]) -> SigmoidFit | None:
    return fit_sigmoid([compute for compute, _ in points], [reward for _, reward in points])


def _error_ahead(points: Sequence[tuple[float, float]]) -> float | None:
    half = len(points) // 2
    fit = _fitted(points[:half])
    # The test of ScaleRL, section 3.
    return fit and fmean(abs(fit.at(compute) - reward) for compute, reward in points[half:])


def _bounded(estimate: Estimate, form: str = ".3f") -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


@dataclass(frozen=True, slots=True)
class Learning:
    """What a sheet shows of the queries over log and archive."""

    charts: Sequence[Chart] = ()
    cards: Sequence[PageElement] = ()


NOTHING_LEARNED = Learning()


def what_was_learned(history: RunHistory, session: "QuerySession") -> Learning:
    """The queries take about a second for 100 000 trajectories."""
    return Learning(_pass_charts(session), [*_bias(session), *_fits(history)])


def _fits(history: RunHistory) -> list[PageElement]:
    rows = [fit.row() for fit in reward_fits(history)]
    note = (
        "R0 + (A − R0) / (1 + (Cmid/C)^B), C the trained tokens, 95 % intervals (ScaleRL); error "
        "ahead: the second half predicted from the first"
    )
    return [card("Sigmoid fits of the reward", note, table(FIT_HEAD, rows))] if rows else []


def _bias(session: "QuerySession") -> list[PageElement]:
    answer = session.answer(f"SELECT measure, quantile, {', '.join(FATES)} FROM bias")
    rows = [
        (MEASURES[measure], f"{quantile:.0%}", *map(_figure, values))
        for some in answer.batches
        for measure, quantile, *values in some
    ]
    counts = session.answer("SELECT fate, count(*) FROM fates GROUP BY ALL ORDER BY ALL")
    sums = ", ".join(f"{number} {fate}" for some in counts.batches for fate, number in some)
    note = f"quantiles over trajectories: {sums}; a bias if trained differs from admitted"
    content = table(["", "quantile", *FATES], rows)
    return [card("Length and difficulty of what is trained", note, content)] if rows else []


def _pass_charts(session: "QuerySession") -> list[Chart]:
    charts: list[Chart] = []
    for source, where in (("training", "of each wave's prompts"), ("held_out", "held out")):
        answer = session.answer(
            f"SELECT step, k, estimate FROM pass_at_k WHERE source = '{source}' ORDER BY step"
        )
        rows = [row for some in answer.batches for row in some]
        series = tuple(
            Series(f"k = {k}", [(float(at), value) for at, n, value in rows if n == k], colour)
            for colour, k in enumerate(K_SHOWN, start=1)
        )
        shown = tuple(curve for curve in series if curve.points)
        charts.append(Chart(f"pass@k, {where}", shown, "unbiased estimate", high=1.0))
    return charts


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
