"""Timelines as SVG: a row for the trainer's steps, then one per rollout with a bar for each time in
which it generated, shaded by version. The axis shortens pauses of the whole run, and the size of a
row is bounded.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rollstream.look.monitor.format import clock
from rollstream.look.monitor.groups import Intervals
from rollstream.look.monitor.state import RequestMove
from rollstream.look.report.cards import Tile, card, heading, scrolled, table, tiles
from rollstream.look.report.chart import text, ticks
from rollstream.look.report.elements import PageElement, element
from rollstream.look.report.history import RolloutHistory, RunHistory, ServedVersion

if TYPE_CHECKING:
    from rollstream.simulator.experiment import PolicyRun
    from rollstream.simulator.results import SimulationResult, TimelineArrow

# Half the width of an arrowhead, in pixels.
ARROW_HALF_WIDTH = 3.5
# Moves that dispatch planned together are at most so far apart: drawn side by side.
PLAN_S = 0.05


def move_arrows(
    moves: Sequence[RequestMove],
    places: Mapping[str, float],
    gap: float,
    x_of: Callable[[float], float],
) -> Iterator[PageElement]:
    """Yields an SVG arrow for each move, from the source's row to the destination's, at the x that
    `x_of` gives for the time of the move. `places` maps the name of each drawn row to the y of its
    middle; an arrow begins and ends `gap` away from it. Moves from or to other rows are left out.
    """
    last_s, x = float("-inf"), 0.0
    for move in moves:
        if not {move.source, move.destination} <= places.keys():
            continue
        x = x_of(move.time_s) if move.time_s - last_s > PLAN_S else x + 1.5 * ARROW_HALF_WIDTH
        last_s = move.time_s
        begin, end = places[move.source], places[move.destination]
        down = 1.0 if end > begin else -1.0
        start, tip, head = begin + down * gap, end - down * gap, down * 2 * ARROW_HALF_WIDTH
        word = "request" if move.requests == 1 else "requests"
        title = f"{move.source} handed {move.requests} {word} to {move.destination}"
        d = (
            f"M{x:.1f} {start:.1f}V{tip:.1f}m{-ARROW_HALF_WIDTH} {-head:g}"
            f"l{ARROW_HALF_WIDTH} {head:g} {ARROW_HALF_WIDTH} {-head:g}"
        )
        yield element("path", {"class": "move", "d": d}, element("title", {}, title))


# Pixels: width of the drawing, its margins for names (left) and notes (right), height of a row, of
# a bar, and of the axis.
WIDTH, LEFT, RIGHT, ROW, BAR, FOOT = 1160.0, 96.0, 64.0, 34.0, 20.0, 24.0
ROWS_MAX = 32  # rollouts drawn
# CSS classes `v0` … `v9`, from the first to the newest version.
SHADES = 10
# Bars or pulls of a row that are drawn one by one, with a title on hover, if there is room.
MARKS_MAX = 400
# If no row has a bar for more than `PAUSE_S` seconds, the axis shows this pause as `PAUSE_SHOWN_S`
# seconds.
PAUSE_S, PAUSE_SHOWN_S = 60.0, 2.0


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A time in which a rollout generated under `version`, or in which the trainer trained the step
    that made `version`. Times are seconds since the epoch, or virtual in a simulation.
    """

    start_s: float
    end_s: float
    version: int


@dataclass(frozen=True, slots=True)
class TimelineRow:
    name: str
    bars: tuple[TimelineBar, ...]
    note: str = ""
    deaths_s: tuple[float, ...] = ()
    pulls: tuple[ServedVersion, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps wall-clock time to a place on the axis, in seconds from its left end. Period i of
    activity, `[starts[i], ends[i]]`, begins at the place `offsets[i]`.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    offsets: tuple[float, ...]

    def at(self, time_s: float) -> float:
        """Returns the place of a time; for a time in a pause the end of the period before it."""
        index = max(0, bisect_right(self.starts, time_s) - 1)
        inside = min(max(time_s, self.starts[index]), self.ends[index]) - self.starts[index]
        return self.offsets[index] + inside

    def shows(self, time_s: float) -> bool:
        """Whether the time is in a period of activity or at most `PAUSE_SHOWN_S` after it."""
        pieces = zip(self.starts, self.ends, strict=True)
        return any(start <= time_s <= end + PAUSE_SHOWN_S for start, end in pieces)

    def length_s(self) -> float:
        return self.offsets[-1] + self.ends[-1] - self.starts[-1]


def timeline_rows(history: RunHistory) -> list[TimelineRow]:
    deaths = history.deaths()

    def died(name: str) -> tuple[float, ...]:
        return tuple(float(event["time_s"]) for event in deaths if event.get("role") == name)

    steps = tuple(
        TimelineBar(done.time_s - done.metrics.get("seconds", 0.0), done.time_s, done.step)
        for _, done in sorted(history.steps.items())
    )
    rows = [TimelineRow("trainer", steps, deaths_s=died("trainer"))]
    seconds = history.figures.seconds
    for name, rollout in sorted(history.rollouts.items())[:ROWS_MAX]:
        share = rollout.idle_s / seconds if seconds else 0.0
        pulls = tuple(sorted(rollout.serving, key=lambda served: served.time_s)[1:])
        note = f"{min(1.0, share):.0%} idle"
        rows.append(TimelineRow(name, version_bars(rollout), note, died(name), pulls))
    return rows


def version_bars(rollout: RolloutHistory) -> tuple[TimelineBar, ...]:
    serving = sorted(rollout.serving, key=lambda served: served.time_s)
    # The records were truncated, in a run without an archive.
    if not serving:
        return ()
    ends = [served.time_s for served in serving[1:]] + [float("inf")]
    return tuple(
        TimelineBar(start, end, served.version)
        for served, until in zip(serving, ends, strict=True)
        for start, end in rollout.busy.within(served.time_s, until)
    )


def time_axis(rows: Sequence[TimelineRow]) -> TimeAxis | None:
    """Returns an axis that covers the bars of all rows; None if there are no bars."""
    active = Intervals(PAUSE_S)
    for row in rows:
        for bar in row.bars:
            active.add(bar.start_s, bar.end_s)
    if not active.starts:
        return None
    offsets, offset = [0.0], 0.0
    for start, end in zip(active.starts, active.ends, strict=True):
        offset += end - start + PAUSE_SHOWN_S
        offsets.append(offset)
    return TimeAxis(tuple(active.starts), tuple(active.ends), tuple(offsets[:-1]))


def draw_timeline(history: RunHistory, marks: int) -> PageElement | None:
    """Returns the timeline with about `marks` bars and marks at most, and a quarter as many moves,
    the newest; None if nothing was generated or trained.
    """
    rows = timeline_rows(history)
    axis = time_axis(rows)
    if axis is None:
        return None
    newest = max((bar.version for row in rows for bar in row.bars), default=0)
    most = marks_per_row(len(rows) - 1, marks)
    parts = [part for n, row in enumerate(rows) for part in _row(row, n, axis, newest, most)]
    places = {row.name: index * ROW + ROW / 2 for index, row in enumerate(rows)}
    shown = [move for move in history.moves if axis.shows(move.time_s)][-(marks // 4) :]
    parts += move_arrows(shown, places, BAR / 2, lambda time_s: _x(axis.at(time_s), axis))
    return _drawing("Timeline of every rollout", parts, ROW * len(rows), axis)


def marks_per_row(rollouts: int, marks: int) -> int:
    """Returns how many bars a row may have that are drawn one by one."""
    return min(MARKS_MAX, marks // (1 + min(rollouts, ROWS_MAX)))


def _drawing(
    label: str, parts: Sequence[PageElement], rows_height: float, axis: TimeAxis
) -> PageElement:
    height = rows_height + FOOT
    marks = (
        text(_x(value, axis), height - 6, clock(value), "tick mid")
        for value in ticks(0.0, axis.length_s(), 10)
    )
    box = {"viewBox": f"0 0 {WIDTH:g} {height:g}", "role": "img", "aria-label": label}
    return element("svg", box, *parts, *marks)


def _row(
    row: TimelineRow, index: int, axis: TimeAxis, newest: int, most: int
) -> Iterator[PageElement]:
    top = index * ROW + (ROW - BAR) / 2
    middle = top + BAR / 2
    yield from _bars(row, top, BAR, axis, newest, most)
    pulls = [pull for pull in row.pulls if axis.shows(pull.time_s)]
    # More would hide the bars, whose shades show the versions in any case.
    for pull in pulls if len(pulls) <= most else ():
        d = f"M{_x(axis.at(pull.time_s), axis):.1f} {top - 3:g}v{BAR + 6:g}"
        yield _titled({"class": "pull", "d": d}, f"{row.name} took version {pull.version}")
    died = {round(_x(axis.at(death), axis)) for death in filter(axis.shows, row.deaths_s)}
    for x in sorted(died):
        d = f"M{x - 5:d} {middle - 5:.1f}l10 10m0 -10l-10 10"
        yield _titled({"class": "death", "d": d}, f"{row.name} died")


def _titled(attributes: Mapping[str, str], title: str) -> PageElement:
    return element("path", attributes, element("title", {}, title))


def _bars(
    row: TimelineRow, top: float, high: float, axis: TimeAxis, newest: int, most: int = MARKS_MAX
) -> Iterator[PageElement]:
    right = WIDTH - RIGHT
    yield text(0, top + high / 2 + 4, row.name, "label")
    yield element(
        "path", {"class": "track", "d": f"M{LEFT:g} {top:g}H{right:g}v{high:g}H{LEFT:g}z"}
    )
    yield text(right + 8, top + high / 2 + 4, row.note, "tick")
    if len(row.bars) > most:
        yield from _thin_bars(row, top, high, axis, newest)
        return
    for bar in row.bars:
        x, end = _x(axis.at(bar.start_s), axis), _x(axis.at(bar.end_s), axis)
        wide = max(0.4, end - x - 0.6)
        d = f"M{x:.1f} {top:g}h{wide:.1f}v{high:g}h-{wide:.1f}z"
        title = f"{row.name}, version {bar.version}, {bar.end_s - bar.start_s:.1f} s"
        yield _titled({"class": f"v{_shade(bar.version, newest)}", "d": d}, title)


def _thin_bars(
    row: TimelineRow, top: float, high: float, axis: TimeAxis, newest: int
) -> Iterator[PageElement]:
    # Pixel → shade of the newest version in it.
    shades: dict[int, int] = {}
    for bar in row.bars:
        x, end = _x(axis.at(bar.start_s), axis), _x(axis.at(bar.end_s), axis)
        for pixel in range(int(x), max(int(x) + 1, round(end))):
            shades[pixel] = max(shades.get(pixel, 0), _shade(bar.version, newest))
    # One path for each shade, over all pixels of that shade, bounds the size.
    paths: dict[int, list[str]] = {}
    # Pixel − index is equal for adjacent pixels.
    numbered = enumerate(sorted(shades))
    for (_, shade), run in groupby(numbered, lambda pair: (pair[1] - pair[0], shades[pair[1]])):
        pixels = [pixel for _, pixel in run]
        d = f"M{pixels[0]} {top:g}h{len(pixels)}v{high:g}h-{len(pixels)}z"
        paths.setdefault(shade, []).append(d)
    title = f"{row.name}, {len(row.bars)} periods of versions"
    for shade, segments in sorted(paths.items()):
        yield _titled({"class": f"v{shade}", "d": "".join(segments)}, title)


def _shade(version: int, newest: int) -> int:
    return min(SHADES - 1, version * SHADES // (newest + 1))


def _x(shown_s: float, axis: TimeAxis) -> float:
    return LEFT + shown_s / max(1e-9, axis.length_s()) * (WIDTH - LEFT - RIGHT)


# Heights on the page of a simulation, in pixels.
SIMULATED_ROW, SIMULATED_BAR = 22.0, 14.0
# The first rollouts and arrows of a simulated run are drawn.
ROWS_SHOWN, ARROWS_SHOWN = 24, 600


def simulation_sheet(runs: Sequence["PolicyRun"]) -> list[PageElement]:
    """Returns the parts of the page of `rollstream simulate --html`."""
    line = "virtual time; docs/explanation/simulator.md describes the model"
    body = [heading("Simulated cluster", line)]
    if runs:
        best = max(runs, key=lambda run: run.result.tokens_per_s)
        fastest = Tile("", best.result.policy, label="fastest")
        body.append(tiles([Tile("", str(len(runs)), label="runs"), fastest]))
    body.append(card("Policies", "speed is trained tokens per second", _summary(runs)))
    for run in runs:
        title = f"{run.result.policy}, {run.cluster.model} on {run.cluster.gpus} GPUs"
        drawn = scrolled("wide", "timeline", draw_simulation(run.result))
        body.append(card(title, result_text(run.result), drawn))
    return body


def draw_simulation(result: "SimulationResult") -> PageElement:
    """Returns the timeline of a simulated run as one `<svg>`. Its arrows are moves, pulls and
    drains: from a drain on, a rollout only finishes work.
    """
    steps = tuple(TimelineBar(step.begun_s, step.ended_s, step.number) for step in result.steps)
    rows = [TimelineRow("trainer", steps)]
    for row in result.rows[:ROWS_SHOWN]:
        rows.append(TimelineRow(row.name, tuple(TimelineBar(*bar) for bar in row.bars)))
    newest = max((step.number for step in result.steps), default=1)
    axis = TimeAxis((0.0,), (max(result.seconds, 1e-9),), (0.0,))
    tops = {row.name: index * SIMULATED_ROW + 4 for index, row in enumerate(rows)}
    tip = element("path", {"d": "M0 0L6 3L0 6z", "class": "tip-of-move"})
    marker = {"id": "tip", "viewBox": "0 0 6 6", "refX": "5", "refY": "3", "markerWidth": "5",
              "markerHeight": "5", "orient": "auto"}  # fmt: skip
    parts = [element("defs", {}, element("marker", marker, tip))]
    for row in rows:
        parts += _bars(row, tops[row.name], SIMULATED_BAR, axis, newest)
    shown = [a for a in result.arrows if a.source in tops and a.target in tops]
    parts += [_arrow(arrow, tops, axis) for arrow in shown[:ARROWS_SHOWN]]
    return _drawing(f"Timeline of {result.policy}", parts, SIMULATED_ROW * len(rows), axis)


def _summary(runs: Sequence["PolicyRun"]) -> PageElement:
    head = ("cluster", "policy", "tokens/s", "KV used", "rollouts idle", "lag mean", "lags")
    return table(head, [
        (
            f"{run.cluster.model} × {run.cluster.gpus}",
            run.result.policy,
            round(run.result.tokens_per_s),
            f"{run.result.kv_utilisation:.1%}",
            f"{run.result.idle_share:.1%}",
            f"{run.result.lag_mean():.2f}",
            ", ".join(f"{lag}: {share:.0%}" for lag, share in run.result.lags.items()),
        )
        for run in runs
    ])  # fmt: skip


def result_text(result: "SimulationResult") -> str:
    counts = result.counts
    return (
        f"{result.tokens_per_s:,.0f} trained tokens per second, a step in {result.step_s:.1f} s; "
        f"{counts.moves} moves, {counts.pulls} pulls, {counts.failures} rollouts died; "
        f"the first {min(len(result.rows), ROWS_SHOWN)} rollouts are drawn"
    )


def _arrow(arrow: "TimelineArrow", tops: Mapping[str, float], axis: TimeAxis) -> PageElement:
    x, to_x = _x(axis.at(arrow.from_s), axis), _x(axis.at(arrow.to_s), axis)
    y, to_y = (tops[name] + SIMULATED_BAR / 2 for name in (arrow.source, arrow.target))
    title = f"{arrow.kind}, {arrow.source} at {clock(arrow.from_s)}"
    if arrow.kind == "move":
        d = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
        return _titled({"class": "line fine c2", "marker-end": "url(#tip)", "d": d}, title)
    colour = "c3" if arrow.kind == "pull" else "c5"
    # A pull is a line under the row's bar as long as the pull, a drain a very short one.
    y, end = y + SIMULATED_BAR / 2, max(to_x, x + 1.5)
    return _titled({"class": f"line {colour}", "d": f"M{x:.1f} {y:.1f}H{end:.1f}"}, title)
