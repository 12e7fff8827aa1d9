"""One measured promise: value, reference, and whether the goal was met."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One line of output. `ratio` is value / reference_value. `goal` applies to `ratio` where there
    is a reference, else to `value`; `goal` and `met` are None where no goal was set. `met` is None,
    too, where the data do not suffice to decide; without any data `value` is nan.
    """

    case: str
    value: float
    unit: str
    reference: str | None
    reference_value: float | None
    ratio: float | None
    goal: float | None
    met: bool | None
    note: str = ""


def against(
    case: str,
    value: float,
    unit: str,
    reference: str,
    reference_value: float,
    goal: float | None = None,
    note: str = "",
) -> Case:
    """A value compared with a reference that did the same work in the same run; `goal` is the
    smallest ratio that meets it.
    """
    ratio = value / reference_value
    met = None if goal is None else ratio >= goal
    return Case(case, value, unit, reference, reference_value, ratio, goal, met, note)


def paired(
    case: str,
    values: Sequence[float],
    unit: str,
    reference: str,
    reference_values: Sequence[float],
    goal: float | None = None,
    note: str = "",
) -> Case:
    """The medians of pairs measured side by side. The ratio is the median of the pairs' ratios; its
    spread is noted.
    """
    ratios = sorted(v / r for v, r in zip(values, reference_values, strict=True))
    ratio = statistics.median(ratios)
    spread = f"ratio {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} pairs"
    value, base = statistics.median(values), statistics.median(reference_values)
    met = None if goal is None else ratio >= goal
    text = f"{spread}; {note}" if note else spread
    return Case(case, value, unit, reference, base, ratio, goal, met, text)


def alone(
    case: str,
    value: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Case:
    """A value without a reference. A goal is a lower bound (`at_least`) or an upper bound
    (`at_most`).
    """
    goal = at_least if at_least is not None else at_most
    met = None
    if goal is not None:
        met = value >= goal if at_least is not None else value <= goal
    return Case(case, value, unit, None, None, None, goal, met, note)
