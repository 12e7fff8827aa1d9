"""The HTML of reports: `page` is the whole document, the other functions are its parts. It needs no
other file and no script, and has a light and a dark mode. A `Chart` is drawn as SVG of bounded
size. A label opens the definition of its figure; an element with numbers names them, in their
order, in `data-figure`, and of what they are in `data-of`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rollstream.look.figures.definitions import figure_of
from rollstream.whole_file import output_file

# Of a chart, in SVG units (about a pixel), margins included.
WIDTH, HEIGHT = 560.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 52.0, 10.0, 26.0  # margins
# Points; a longer series shows no values on hover.
TITLES_MAX = 400
# Of a thinned series, each about a pixel wide.
COLUMNS = int(WIDTH - LEFT - RIGHT)
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


# A range below it is drawn as a flat line: ticks are rounded to ten decimals.
FLAT_RANGE = 1e-8


@dataclass(frozen=True, slots=True)
class Tile:
    """A large number, or several of one figure: `figures` names them in the order of `value`, `of`
    says of what they are (`first last`: of the first and last one that has it). The label is that
    of the first figure, unless the tile has its own.
    """

    figures: str
    value: str
    of: str = ""
    label: str = ""


def draw_chart(chart: Chart) -> str:
    series = _stack(chart.series) if chart.stacked else chart.series
    scale = _scale(chart, series)
    parts = [_grid(scale, chart.form)]
    lines = [replace(line, points=thinned(line.points)) for line in series if line.points]
    parts += _areas(lines, scale) if chart.stacked else [_line(line, scale) for line in lines]
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


def text(x: float, y: float, words: str, kind: str, numbers: str = "") -> str:
    """Returns a `<text>` at (x, y) with the CSS classes `kind`; `mid` centres it there, `end` lets
    it end there. `numbers` are attributes that name the figure.
    """
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{numbers}>{escape(words)}</text>'


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
    return Scale((min(0.0, *xs), max(xs)), (low, high))


def _grid(scale: Scale, form: str) -> str:
    parts: list[str] = []
    left, right, tick_form = LEFT, WIDTH - RIGHT, ".0%" if form.endswith("%") else "g"
    for value in ticks(*scale.y):
        _, y = scale.place(scale.x[0], value)
        parts.append(f'<path class="grid" d="M{left:g} {y:.1f}H{right:g}"/>')
        parts.append(text(left - 8, y + 4, format(value, tick_form), "tick end"))
    for value in ticks(*scale.x, count=6, is_whole=True):
        x, _ = scale.place(value, scale.y[0])
        parts.append(text(x, HEIGHT - 8, f"{value:g}", "tick mid"))
    return "".join(parts)


def _stack(series: Sequence[Series]) -> tuple[Series, ...]:
    below: dict[float, float] = {}
    stacked: list[Series] = []
    for area in series:
        for x, y in area.points:
            below[x] = below.get(x, 0.0) + y
        stacked.append(Series(area.name, [(x, below[x]) for x, _ in area.points], area.colour))
    return tuple(stacked)


def _path(points: Points, scale: Scale) -> str:
    places = (scale.place(x, y) for x, y in points if math.isfinite(y))
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _line(series: Series, scale: Scale) -> str:
    kind = "line thin" if series.thin else "line"
    return f'<path class="{kind} c{series.colour}" d="M{_path(series.points, scale)}"/>'


def _areas(stacked: Sequence[Series], scale: Scale) -> list[str]:
    parts: list[str] = []
    # The uppermost first, down to the axis; the next one covers its lower part.
    for area in reversed(stacked):
        if area.points:
            first, last = area.points[0][0], area.points[-1][0]
            foot = [(last, scale.y[0]), (first, scale.y[0])]
            d = f"M{_path([*area.points, *foot], scale)}Z"
            parts.append(f'<path class="area c{area.colour}" d="{d}"/>')
    return parts


def _points(placed: Series, values: Series, scale: Scale, chart: Chart) -> str:
    if not values.points or len(values.points) > TITLES_MAX:
        return ""
    parts: list[str] = []
    # In stacked charts the value differs from the place of its point.
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
    ends: list[tuple[float, float, str, str]] = []
    for index, (line, raw) in enumerate(zip(placed, values, strict=True)):
        if not line.points or not math.isfinite(line.points[-1][1]):
            continue
        x, y = line.points[-1]
        # Labels are in the middle of bands; narrow bands have none.
        if chart.stacked:
            y -= raw.points[-1][1] / 2
            if raw.points[-1][1] < 0.04 and index:
                continue
        across, up = scale.place(x, y)
        words = format(raw.points[-1][1], chart.form)
        ends.append((up, across, words, _numbers(raw.figure, f"{x:g}")))
    parts: list[str] = []
    free = TOP
    for up, across, words, numbers in sorted(ends):
        # Labels that would overlap move down.
        free = max(free, up)
        parts.append(text(across + 7, free + 4, words, "value", numbers))
        free += 14
    return parts


# The CSS of the page. `c1` to `c8` are colours of series; `v0` to `v9` are shades of versions in a
# timeline, from old to new.
STYLE = """
:root { color-scheme: light dark;
  --page:#f7f7f5; --card:#fff; --ink:#1b1c1e; --soft:#62656b; --rule:#e4e4e0; --track:#f0f0ec;
  --c1:#2a6fd1; --c2:#d9622b; --c3:#1c8f78; --c4:#8a55c8;
  --c5:#b8860b; --c6:#c2408f; --c7:#5a6f85; --c8:#3c7a1e;
  --bad:#c4342d; --edge:#fff;
  --v0:#cfe1f8; --v1:#b5d2f4; --v2:#9ac2ef; --v3:#7fb1ea; --v4:#639fe4; --v5:#488cdb;
  --v6:#3079cd; --v7:#2267b5; --v8:#175598; --v9:#0e437b; }
@media (prefers-color-scheme: dark) { :root {
  --page:#16181b; --card:#1e2125; --ink:#eceded; --soft:#a0a4ab; --rule:#32363c; --track:#282c31;
  --c1:#5b9bf0; --c2:#f0854f; --c3:#3fbf9f; --c4:#b48bea;
  --c5:#d9ad3c; --c6:#ee7fc0; --c7:#9db2c8; --c8:#86c766;
  --bad:#ff7a70; --edge:#1e2125;
  --v0:#1d3a5c; --v1:#214a78; --v2:#265b94; --v3:#2d6cb0; --v4:#387fca; --v5:#4c92de;
  --v6:#68a6ea; --v7:#87baf1; --v8:#a8cff7; --v9:#cbe3fc; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width:1220px; margin:0 auto; padding:32px 20px 64px; }
h1 { font-size:26px; font-weight:650; letter-spacing:-.01em; margin:0; }
h2 { font-size:15px; font-weight:620; margin:0; }
p.soft, .note { color:var(--soft); margin:2px 0 0; }
.note { font-size:13px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(168px,1fr)); gap:12px;
  margin:24px 0 12px; }
.tile, .card { background:var(--card); border:1px solid var(--rule); border-radius:10px; }
.tile { padding:12px 16px; }
.tile b { display:block; font-size:23px; font-weight:620; letter-spacing:-.01em; }
.tile details { color:var(--soft); font-size:13px; }
.figure > summary { font-weight:inherit; padding:0; list-style:none;
  text-decoration:underline dotted; text-underline-offset:3px; }
.figure > summary::-webkit-details-marker { display:none; }
.figure > p { color:var(--soft); font:13px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif;
  margin:3px 0 5px; max-width:60ch; text-align:left; white-space:normal; }
.figure h2 { display:inline; }
th .figure > p { max-width:26ch; }
.charts { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(480px,100%),1fr));
  gap:12px; margin:12px 0; }
.card { padding:16px 18px 10px; min-width:0; }
.card.wide { margin:12px 0; overflow-x:auto; }
.card.wide svg { min-width:760px; }
svg { display:block; width:100%; height:auto; margin-top:6px; overflow:visible;
  font:12px system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
.legend { display:flex; flex-wrap:wrap; gap:2px 16px; margin-top:4px; font-size:13px;
  color:var(--soft); }
.legend i { display:inline-block; width:14px; height:3px; border-radius:2px; margin-right:6px;
  vertical-align:middle; background:var(--c); }
.legend i.thin { height:0; background:none; border-top:2px dotted var(--c); }
.grid { stroke:var(--rule); stroke-width:1; }
.tick { fill:var(--soft); font-size:12px; font-variant-numeric:tabular-nums; }
.value, .label { fill:var(--ink); font-size:12.5px; font-variant-numeric:tabular-nums; }
.value { font-weight:600; } .mid { text-anchor:middle; } .end { text-anchor:end; }
.line { fill:none; stroke:var(--c); stroke-width:2; stroke-linejoin:round; stroke-linecap:round; }
.line.thin { stroke-width:1.5; stroke-dasharray:1 4; }
.area { fill:color-mix(in srgb, var(--c) 85%, var(--card)); stroke:var(--edge); stroke-width:2; }
.dot { fill:var(--c); opacity:0; } .dot:hover, .dot.alone { opacity:1; }
.c1 { --c:var(--c1); } .c2 { --c:var(--c2); } .c3 { --c:var(--c3); } .c4 { --c:var(--c4); }
.c5 { --c:var(--c5); } .c6 { --c:var(--c6); } .c7 { --c:var(--c7); } .c8 { --c:var(--c8); }
.track { fill:var(--track); }
.pull { stroke:var(--c3); stroke-width:2; fill:none; }
.move { fill:var(--c2); } .move .shaft { fill:none; stroke:var(--c2); stroke-width:1.6; }
.death { stroke:var(--bad); stroke-width:2.5; fill:none; stroke-linecap:round; }
.v0{fill:var(--v0)} .v1{fill:var(--v1)} .v2{fill:var(--v2)} .v3{fill:var(--v3)} .v4{fill:var(--v4)}
.v5{fill:var(--v5)} .v6{fill:var(--v6)} .v7{fill:var(--v7)} .v8{fill:var(--v8)} .v9{fill:var(--v9)}
table { border-collapse:collapse; min-width:min(100%,420px); margin:8px 0 6px; font-size:14px; }
th { color:var(--soft); font-weight:500; text-align:left; }
th, td { padding:4px 14px 4px 0; border-bottom:1px solid var(--rule); vertical-align:top;
  overflow-wrap:anywhere; }
tr:last-child td { border-bottom:0; }
td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; }
summary { cursor:pointer; font-weight:620; padding-bottom:6px; }
"""


def page(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def write_page(text: str, path: Path, is_typed: bool) -> None:
    """Write the page so that readers never see a part of it (`output_file`)."""
    with output_file(path, is_typed) as partial:
        partial.write_text(text, encoding="utf-8")


def heading(title: str, line: str) -> str:
    return f'<h1>{escape(title)}</h1><p class="soft">{escape(line)}</p>'


def tiles(shown: Sequence[Tile]) -> str:
    cells = (
        f'<div class="tile"><b{_numbers(tile.figures, tile.of)}>{escape(tile.value)}</b>'
        f"{_defined(tile.label or _label(tile.figures), tile.figures)}</div>"
        for tile in shown
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _label(figures: str) -> str:
    return figure_of(figures.split()[0]).label


def _numbers(figures: str, of: str = "") -> str:
    if not figures:
        return ""
    subject = f' data-of="{escape(of, quote=True)}"' if of else ""
    return f' data-figure="{escape(figures, quote=True)}"{subject}'


def _defined(label: str, figures: str, tag: str = "") -> str:
    """Returns a label, in an element `tag`, that opens the definitions of its figures; without
    figures a plain one.
    """
    words = f"<{tag}>{escape(label)}</{tag}>" if tag else escape(label)
    if not figures:
        return words
    named = dict.fromkeys(figures.split())
    lines = (escape(figure_of(name).definition) for name in named)
    if len(named) > 1:
        lines = (
            f"{escape(figure_of(name).label)}: {line}"
            for name, line in zip(named, lines, strict=True)
        )
    parts = "".join(f"<p>{line}</p>" for line in lines)
    return f'<details class="figure"><summary>{words}</summary>{parts}</details>'


def charts(drawn: Sequence[Chart]) -> str:
    cards = (_chart_card(chart) for chart in drawn if not chart.is_empty())
    return f'<div class="charts">{"".join(cards)}</div>'


def wide(title: str, note: str, content: str) -> str:
    return (
        f'<section class="card wide"><h2>{escape(title)}</h2>'
        f'<p class="note">{escape(note)}</p>{content}</section>'
    )


def folded(title: str, content: str) -> str:
    return (
        f'<section class="card wide"><details><summary>{escape(title)}</summary>'
        f"{content}</details></section>"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str | int]], figures: Sequence[str] = ()
) -> str:
    """Returns a table; columns of integers are right-aligned. `figures` names what each column
    shows, "" for a column without numbers; of a row they are those of its first cell.
    """
    numeric = [all(isinstance(row[i], int) for row in rows) for i in range(len(head))]
    figures = figures or [""] * len(head)

    def cells(tag: str, contents: Sequence[str], shown: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if right else ''}{numbers}>{content}</{tag}>"
            for content, right, numbers in zip(contents, numeric, shown, strict=True)
        )

    labels = [_defined(label, figure) for label, figure in zip(head, figures, strict=True)]
    body = "".join(
        f"<tr>{cells('td', [_cell(value) for value in row], _of_row(row, figures))}</tr>"
        for row in rows
    )
    return f"<table><tr>{cells('th', labels, [''] * len(head))}</tr>{body}</table>"


def _cell(value: str | int) -> str:
    return escape(group_digits(value) if isinstance(value, int) else value)


def _of_row(row: Sequence[str | int], figures: Sequence[str]) -> list[str]:
    return [_numbers(f, "" if f.startswith("run.") else str(row[0])) for f in figures]


def group_digits(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _chart_card(chart: Chart) -> str:
    legend = ""
    if len(chart.series) > 1:
        items = (
            f'<span class="c{line.colour}"><i{" class=thin" if line.thin else ""}></i>'
            f"{escape(line.name)}</span>"
            for line in chart.series
            if line.points
        )
        legend = f'<div class="legend">{"".join(items)}</div>'
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    named = " ".join(dict.fromkeys(line.figure for line in chart.series if line.figure))
    title, drawn = _defined(chart.title, named, "h2"), draw_chart(chart)
    return f'<section class="card">{title}{note}{legend}{drawn}</section>'
