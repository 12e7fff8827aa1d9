"""What docs/explanation/evidence.md shows of the committed rows: the table of all comparisons,
between two marks in the page, and the plot of rewards over trained tokens beside it.

`python -m studies.evidence.page` writes both again. The same rows give the same bytes.
"""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

import numpy as np

from benchmarks.histospec.plot import picture
from rollstream.look.report.chart import Chart, Series
from studies.evidence.arms import CHOICES, LAGS, LOSSES, RECORDED, TRL, WORLDS
from studies.evidence.comparisons import count, table
from studies.evidence.rows import EvidenceRow, by_seed, read_rows
from testbed.repository import ROOT

PAGE = ROOT / "docs" / "explanation" / "evidence.md"
PLOT = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- comparisons -->\n\n", "\n\n<!-- end of comparisons -->"
POINTS = 40  # of a curve
SHOWN = ("lag0", "uncorrected", "truncated_is", "dapo", "dppo", "gspo", "topr")
PLOTTED = (
    ("lags, truncated_is", [arm.name for arm in LAGS]),
    ("lags, other losses", ["lag0", *(arm.name for arm in CHOICES)]),
    ("stress", [f"stress_{name}" for name in ("lag0", *LOSSES) if name in SHOWN]),
    ("TRL beside it", ["lag0", TRL.name]),
    ("one recorded log", ["lag8", *(arm.name for arm in RECORDED[:6])]),
    ("one recorded log, other presets", ["lag8", *(arm.name for arm in RECORDED[6:])]),
)


def main() -> None:
    rows = list(read_rows())
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    PLOT.write_text(picture(charts(rows)), encoding="utf-8")


def with_table(page: str, rows: Sequence[EvidenceRow]) -> str:
    """Returns the page's text with the table of these rows between its marks."""
    before, rest = page.split(BEGIN)
    return BEGIN.join((before, END.join(("\n".join(table(rows)), rest.split(END)[1]))))


def charts(rows: Sequence[EvidenceRow]) -> list[Chart]:
    """Returns a chart for each world and kind of arms that have rows: the share of right answers of
    each step, mean over the seeds, over the trained tokens before it.
    """
    drawn: list[Chart] = []
    for world in WORLDS:
        for title, arms in PLOTTED:
            found = [(arm, list(by_seed(rows, world, arm).values())) for arm in arms]
            series = tuple(
                Series(arm.removeprefix("stress_").removeprefix("recorded_"), _curve(runs), colour)
                for colour, (arm, runs) in enumerate(found, start=1)
                if runs
            )
            if len(series) > 1:
                seeds = count(min(len(runs) for _, runs in found if runs), "seed")
                full = f"{world}: {title} ({seeds} each)"
                note, along = "right answers in training", "thousand tokens"
                drawn.append(Chart(full, series, note, high=1.0, along=along))
    return drawn


def _curve(runs: Sequence[EvidenceRow]) -> list[tuple[float, float]]:
    """Returns the mean curve, over the numbers of tokens that every run reached."""
    last = min(_tokens(run)[-1] for run in runs)
    curve: list[tuple[float, float]] = []
    for at in range(POINTS):
        tokens = last * at / (POINTS - 1)
        each = [float(np.interp(tokens, _tokens(run), _smooth(run))) for run in runs]
        curve.append((tokens / 1000, fmean(each)))
    return curve


def _tokens(run: EvidenceRow) -> list[float]:
    """The trained tokens before each step."""
    each = [value or 0.0 for value in run.steps["tokens_trained"]]
    return [0.0, *accumulate(each[:-1])]


def _smooth(run: EvidenceRow) -> list[float]:
    """The accuracy of each step as the mean of it and its neighbours."""
    values = [value or 0.0 for value in run.steps["accuracy"]]
    return [fmean(values[max(0, at - 1) : at + 2]) for at in range(len(values))]


if __name__ == "__main__":
    main()
