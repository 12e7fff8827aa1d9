"""Draws charts as SVG of bounded size: lines or areas over steps, versions or tokens. Each series
carries the values of its points (`data-x`, `data-y`), which the explorer's page shows at the
cursor; without a script the last values stand beside the curves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from rollstream.look.report.elements import PageElement, element

# Of a chart, in SVG units (about a pixel), margins included.
WIDTH, HEIGHT = 560.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 52.0, 10.0, 26.0  # margins
# Of a thinned series, each about two pixels wide.
COLUMNS = int(WIDTH - LEFT - RIGHT) // 2
# (x, y) of the points of a series, in the order of x.
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line or area, in the colour of the CSS class `c1` to `c8`. `thin` draws a dotted line,
    for bounds of another series, e.g. a maximum. `figure` is the name of what it shows.
    """

    name: str
    points: Points
    colour: int = 1
    thin: bool = False
    figure: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """One or several series with common axes. The y-axis begins at `low` or the smallest value if
    that is lower, with None at the smallest value; it ends at `high`, with None at the largest
    value. `form` is the format of values; `note` is the line under the title.
    """

    title: str
    series: tuple[Series, ...]
    note: str = ""
    form: str = ".2f"
    low: float | None = 0.0
    high: float | None = None
    stacked: bool = False
    """Draw areas, each on top of the previous ones, in place of lines."""
    along: str = "step"

    def is_empty(self) -> bool:
        return not any(series.points for series in self.series)

    def is_thinned(self, columns: int = COLUMNS) -> bool:
        return any(len(series.points) > 2 * columns for series in self.series)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to SVG coordinates. `x` and `y` are the first and last value of each axis; larger
    y values are drawn higher.
    """

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        share_x = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        share_y = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        across = LEFT + share_x * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - share_y * (HEIGHT - TOP - BOTTOM)


NO_FIGURE: Mapping[str, str] = {}
# A range below it is drawn as a flat line: ticks are rounded to ten decimals.
FLAT_RANGE = 1e-8


def draw_chart(chart: Chart, columns: int = COLUMNS) -> PageElement:
    """Returns the chart; of a series of more than `2 * columns` points the extremes (`thinned`)."""
    thin = _every if chart.stacked else thinned
    values = [replace(line, points=thin(line.points, columns)) for line in chart.series]
    placed = _stack(values) if chart.stacked else values
    scale = _scale(chart, placed)
    pairs = [(line, raw) for line, raw in zip(placed, values, strict=True) if raw.points]
    # The uppermost area first, down to the axis; the next one covers its lower part.
    drawn = pairs[::-1] if chart.stacked else pairs
    lasts = ", ".join(f"{raw.name} {raw.points[-1][1]:{chart.form}}" for _, raw in pairs)
    return element(
        "svg",
        {
            "class": "chart",
            "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}",
            "role": "img",
            "aria-label": f"{chart.title}: {lasts}",
            "data-along": chart.along,
            "data-form": "%" if chart.form.endswith("%") else "",
        },
        *_grid(scale, chart.form),
        *(_curve(line, raw, scale, chart) for line, raw in drawn),
        *_last_values(pairs, scale, chart),
    )


def thinned(points: Points, columns: int = COLUMNS) -> Points:
    """Returns a series of at most `2 * columns` points unchanged; of a longer one the first and the
    last point, and the lowest and the highest one of each of `columns` equal parts of the x-axis,
    in order, so every peak is seen. Points without a finite value are left out.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(points) <= 2 * columns or not finite:
        return points
    first, last = finite[0], finite[-1]
    width = (last[0] - first[0]) / columns or 1.0
    extremes = [first]
    for _, column in groupby(finite, lambda point: int((point[0] - first[0]) / width)):
        column_points = list(column)
        ends = {min(column_points, key=itemgetter(1)), max(column_points, key=itemgetter(1))}
        extremes += sorted(ends - {first, last})
    return [*extremes, last]


def ticks(low: float, high: float, count: int = 4, is_whole: bool = False) -> list[float]:
    """Returns about `count` round values from `low` to `high`; integers only if `is_whole`."""
    if not high > low:
        return [low]
    rough = max((high - low) / count, 1.0 if is_whole else 0.0)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    multiples = (1, 2, 5, 10) if is_whole else (1, 2, 2.5, 5, 10)
    step = next(m * magnitude for m in multiples if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def text(
    x: float, y: float, words: str, kind: str, figure: Mapping[str, str] = NO_FIGURE
) -> PageElement:
    """Returns a `<text>` at (x, y) with the CSS classes `kind`; `mid` centres it there, `end` lets
    it end there. `figure` are attributes that name what it shows.
    """
    return element("text", {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}", **figure}, words)


def _scale(chart: Chart, series: Sequence[Series]) -> Scale:
    xs = [x for line in series for x, _ in line.points] or [0.0]
    ys = [y for line in series for _, y in line.points if math.isfinite(y)] or [0.0]
    low = min(ys) if chart.low is None else min(chart.low, *ys)
    high = chart.high if chart.high is not None else max(ys)
    high = high if high - low > FLAT_RANGE else low + 1.0
    # The axis ends at whole ticks.
    if chart.high is None:
        step = ticks(low, high)
        gap = step[1] - step[0] if len(step) > 1 else high - low
        high = math.ceil(high / gap - 1e-9) * gap
        low = math.floor(low / gap + 1e-9) * gap
    first = min(xs)
    # A part of a run, e.g. a fork, does not begin far to the right.
    return Scale((min(0.0, first) if first <= 0.1 * max(xs) else first, max(xs)), (low, high))


def _grid(scale: Scale, form: str) -> list[PageElement]:
    parts: list[PageElement] = []
    left, right, tick_form = LEFT, WIDTH - RIGHT, ".0%" if form.endswith("%") else "g"
    for value in ticks(*scale.y):
        _, y = scale.place(scale.x[0], value)
        parts.append(element("path", {"class": "grid", "d": f"M{left:g} {y:.1f}H{right:g}"}))
        parts.append(text(left - 8, y + 4, format(value, tick_form), "tick end"))
    for value in ticks(*scale.x, count=6, is_whole=True):
        x, _ = scale.place(value, scale.y[0])
        parts.append(text(x, HEIGHT - 8, f"{value:g}", "tick mid"))
    return parts


def _stack(series: Sequence[Series]) -> tuple[Series, ...]:
    below: dict[float, float] = {}
    stacked: list[Series] = []
    for area in series:
        for x, y in area.points:
            below[x] = below.get(x, 0.0) + y
        stacked.append(Series(area.name, [(x, below[x]) for x, _ in area.points], area.colour))
    return tuple(stacked)


def _every(points: Points, columns: int) -> Points:
    # Areas that are stacked need the same points.
    return [*points[:-1][:: max(1, len(points) // columns)], *points[-1:]]


def _curve(placed: Series, raw: Series, scale: Scale, chart: Chart) -> PageElement:
    # In stacked charts the value differs from the place of its point.
    shown = [
        (scale.place(x, y), x, value)
        for (x, y), (_, value) in zip(placed.points, raw.points, strict=True)
        if math.isfinite(y)
    ]
    d = "L".join(f"{across:.1f} {up:.1f}" for (across, up), _, _ in shown)
    kind = "area" if chart.stacked else "line thin" if raw.thin else "line"
    if chart.stacked and shown:
        foot = HEIGHT - BOTTOM
        d += f"L{shown[-1][0][0]:.1f} {foot:g}L{shown[0][0][0]:.1f} {foot:g}Z"
    elif len(shown) == 1:
        d += "h0"  # round ends make a dot of it
        kind += " alone"
    return element(
        "path",
        {
            "class": f"{kind} c{raw.colour}",
            "d": f"M{d}" if shown else "",
            "data-name": raw.name,
            "data-x": " ".join(f"{x:g}" for _, x, _ in shown),
            "data-y": " ".join(f"{value:.5g}" for _, _, value in shown),
        },
    )


def _last_values(
    pairs: Sequence[tuple[Series, Series]], scale: Scale, chart: Chart
) -> list[PageElement]:
    ends: list[tuple[float, float, str, dict[str, str]]] = []
    for index, (line, raw) in enumerate(pairs):
        if not math.isfinite(line.points[-1][1]):
            continue
        x, y = line.points[-1]
        # Labels are in the middle of bands; narrow bands have none.
        if chart.stacked:
            y -= raw.points[-1][1] / 2
            if raw.points[-1][1] < 0.04 and index:
                continue
        across, up = scale.place(x, y)
        figure = {"data-figure": raw.figure, "data-of": f"{x:g}" if raw.figure else ""}
        ends.append((up, across, format(raw.points[-1][1], chart.form), figure))
    parts: list[PageElement] = []
    free = TOP
    for up, across, words, figure in sorted(ends, key=itemgetter(0, 1, 2)):
        # Labels that would overlap move down.
        free = max(free, up)
        parts.append(text(across + 7, free + 4, words, "value", figure))
        free += 14
    return parts
