"""Charts as SVG: lines over steps, and shares as stacked areas.

Colours are CSS classes (`c1` … `c8`), which the page defines for light and dark mode. Every point
has a `<title>`, so the browser shows its value on hover without a script.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 52.0, 10.0, 26.0
TITLES_MAX = 400  # longer series get no values on hover
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """A line with colour class 1–8. `thin` is for lines that bound another one, e.g. a maximum."""

    name: str
    points: Points
    colour: int = 1
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Series with common axes; without `low` or `high` the data set the bound."""

    title: str
    series: tuple[Series, ...]
    note: str = ""
    form: str = ".2f"
    low: float | None = 0.0
    high: float | None = None
    stacked: bool = False
    along: str = "step"
    """The unit of x."""

    def is_empty(self) -> bool:
        return not any(series.points for series in self.series)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to SVG coordinates; larger y values are drawn higher."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        share_x = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        share_y = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        across = LEFT + share_x * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - share_y * (HEIGHT - TOP - BOTTOM)


FLAT_RANGE = 1e-8  # a range below it is drawn as a flat line: ticks are rounded to ten decimals


def draw_chart(chart: Chart) -> str:
    """Returns the chart as one `<svg>`."""
    series = _stack(chart.series) if chart.stacked else chart.series
    scale = _scale(chart, series)
    parts = [_grid(scale, chart.form)]
    if chart.stacked:
        parts += _areas(series, scale)
    else:
        parts += [_line(one, scale) for one in series if one.points]
    parts += [
        _points(shown, values, scale, chart)
        for shown, values in zip(series, chart.series, strict=True)
    ]
    parts += _last_values(series, chart.series, scale, chart)
    label = escape(chart.title, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float, count: int = 4, whole: bool = False) -> list[float]:
    """Returns about `count` round values from `low` to `high`; integers only if `whole`."""
    if not high > low:
        return [low]
    rough = max((high - low) / count, 1.0 if whole else 0.0)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    multiples = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(m * magnitude for m in multiples if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def text(x: float, y: float, words: str, kind: str) -> str:
    """Returns a `<text>` with CSS classes `kind`; `mid` and `end` set its anchor."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _scale(chart: Chart, series: Sequence[Series]) -> Scale:
    xs = [x for one in series for x, _ in one.points] or [0.0]
    ys = [y for one in series for _, y in one.points if math.isfinite(y)] or [0.0]
    low = min(ys) if chart.low is None else min(chart.low, *ys)
    high = chart.high if chart.high is not None else max(ys)
    high = high if high - low > FLAT_RANGE else low + 1.0
    if chart.high is None:
        step = ticks(low, high)
        gap = step[1] - step[0] if len(step) > 1 else high - low
        high = math.ceil(high / gap - 1e-9) * gap
        low = math.floor(low / gap + 1e-9) * gap
    return Scale((min(0.0, *xs), max(xs)), (low, high))


def _grid(scale: Scale, form: str) -> str:
    parts: list[str] = []
    left, right = LEFT, WIDTH - RIGHT
    for value in ticks(*scale.y):
        _, y = scale.place(scale.x[0], value)
        parts.append(f'<path class="grid" d="M{left:g} {y:.1f}H{right:g}"/>')
        parts.append(text(left - 8, y + 4, _tick(value, form), "tick end"))
    for value in ticks(*scale.x, count=6, whole=True):
        x, _ = scale.place(value, scale.y[0])
        parts.append(text(x, HEIGHT - 8, f"{value:g}", "tick mid"))
    return "".join(parts)


def _tick(value: float, form: str) -> str:
    return f"{value:.0%}" if form.endswith("%") else f"{value:g}"


def _stack(series: Sequence[Series]) -> tuple[Series, ...]:
    """Stacks each series on the sum of the previous ones."""
    below: dict[float, float] = {}
    stacked: list[Series] = []
    for one in series:
        for x, y in one.points:
            below[x] = below.get(x, 0.0) + y
        stacked.append(Series(one.name, [(x, below[x]) for x, _ in one.points], one.colour))
    return tuple(stacked)


def _path(points: Points, scale: Scale) -> str:
    places = (scale.place(x, y) for x, y in points if math.isfinite(y))
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _line(series: Series, scale: Scale) -> str:
    kind = "line thin" if series.thin else "line"
    return f'<path class="{kind} c{series.colour}" d="M{_path(series.points, scale)}"/>'


def _areas(stacked: Sequence[Series], scale: Scale) -> list[str]:
    """Draws from the top down: each area covers the lower part of the previous one."""
    parts: list[str] = []
    for one in reversed(stacked):
        if one.points:
            first, last = one.points[0][0], one.points[-1][0]
            foot = [(last, scale.y[0]), (first, scale.y[0])]
            d = f"M{_path([*one.points, *foot], scale)}Z"
            parts.append(f'<path class="area c{one.colour}" d="{d}"/>')
    return parts


def _points(placed: Series, values: Series, scale: Scale, chart: Chart) -> str:
    if not values.points or len(values.points) > TITLES_MAX:
        return ""
    parts: list[str] = []
    for (x, y), (_, value) in zip(placed.points, values.points, strict=True):
        across, up = scale.place(x, y)
        title = f"{values.name}, {chart.along} {x:g}: {value:{chart.form}}"
        dot = "dot alone" if len(values.points) == 1 else "dot"
        parts.append(
            f'<circle class="{dot} c{values.colour}" cx="{across:.1f}" cy="{up:.1f}" r="4">'
            f"<title>{escape(title)}</title></circle>"
        )
    return "".join(parts)


def _last_values(
    placed: Sequence[Series], values: Sequence[Series], scale: Scale, chart: Chart
) -> list[str]:
    """Labels the end of each line with its newest value, moved apart to avoid overlaps."""
    ends: list[tuple[float, float, str]] = []
    for index, (one, raw) in enumerate(zip(placed, values, strict=True)):
        if not one.points or not math.isfinite(one.points[-1][1]):
            continue
        x, y = one.points[-1]
        if chart.stacked:  # a share is labelled at the middle of its band
            y -= raw.points[-1][1] / 2
            if raw.points[-1][1] < 0.04 and index:
                continue
        across, up = scale.place(x, y)
        ends.append((up, across, format(raw.points[-1][1], chart.form)))
    parts: list[str] = []
    free = TOP
    for up, across, words in sorted(ends):
        free = max(free, up)
        parts.append(text(across + 7, free + 4, words, "value"))
        free += 14
    return parts
