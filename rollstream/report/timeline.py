"""Draws the timeline of a run, with a row per rollout: its generating times by version, its weight
pulls, its moves and its deaths. It also draws the page of a simulation, with one timeline per
simulated run: a move is an arrow from source to destination, a pull a short mark, a drain a tick.

Pauses without any activity (e.g. a run stopped overnight) are cut out of the axis. The size of a
row is bounded: in a long run each pixel shows only the newest version of its time, if there is one.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.monitor.format import clock
from rollstream.monitor.groups import Intervals
from rollstream.monitor.state import RequestMove
from rollstream.report.history import RolloutHistory, RunHistory, ServedVersion
from rollstream.report.page import heading, page, table, text, ticks, tiles, wide

if TYPE_CHECKING:
    from rollstream.simulator.experiment import PolicyRun
    from rollstream.simulator.results import SimulationResult, TimelineArrow

DRAWN_MAX = 2000  # newest moves drawn; more would merge into an area and take megabytes
ARROW_HALF_WIDTH = 3.5  # half the width of an arrowhead
PLAN_S = 0.05  # moves of one plan have nearly equal times and are drawn side by side


def move_arrows(
    moves: Sequence[RequestMove],
    places: Mapping[str, float],
    gap: float,
    x_of: Callable[[float], float],
) -> Iterator[str]:
    """Yields an arrow per move, from the edge of the source's row to the edge of the destination's.

    `places` maps a drawn row to the y of its middle; the edge is `gap` away from it. Moves of rows
    that are not drawn are left out.
    """
    drawn = [m for m in moves if {m.source, m.destination} <= places.keys()]
    last_s, x = float("-inf"), 0.0
    for move in drawn[-DRAWN_MAX:]:
        x = x_of(move.time_s) if move.time_s - last_s > PLAN_S else x + 1.5 * ARROW_HALF_WIDTH
        last_s = move.time_s
        begin, end = places[move.source], places[move.destination]
        down = 1.0 if end > begin else -1.0
        start, tip = begin + down * gap, end - down * gap
        foot = tip - down * 2 * ARROW_HALF_WIDTH
        word = "request" if move.requests == 1 else "requests"
        title = f"{move.source} handed {move.requests} {word} to {move.destination}"
        yield (
            f'<g class="move"><title>{escape(title)}</title>'
            f'<path class="shaft" d="M{x:.1f} {start:.1f}V{foot:.1f}"/>'
            f'<path d="M{x - ARROW_HALF_WIDTH:.1f} {foot:.1f}'
            f'h{2 * ARROW_HALF_WIDTH:g}L{x:.1f} {tip:.1f}z"/></g>'
        )


WIDTH, LEFT, RIGHT, ROW, BAR, FOOT = 1160.0, 96.0, 64.0, 34.0, 20.0, 24.0
ROWS_MAX = 32
SHADES = 10  # classes `v0` … `v9`, from the first to the newest version
MARKS_MAX = 400  # bars or pulls of a row that are drawn one by one, with a title on hover
PAUSE_S, PAUSE_SHOWN_S = 60.0, 2.0


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """Marks the time in which a row used one version, or trained one step; times are seconds since
    the epoch.
    """

    start_s: float
    end_s: float
    version: int


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """Shows one process by its bars, a note at the right, and the times of its deaths."""

    name: str
    bars: tuple[TimelineBar, ...]
    note: str = ""
    deaths_s: tuple[float, ...] = ()
    pulls: tuple[ServedVersion, ...] = ()
    """Versions that the rollout pulled, without the first."""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps wall-clock time to seconds of activity by joining the periods `[starts, ends]`."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    offsets: tuple[float, ...]

    def at(self, time_s: float) -> float:
        """Returns the axis position of a time, in seconds."""
        index = max(0, bisect_right(self.starts, time_s) - 1)
        inside = min(max(time_s, self.starts[index]), self.ends[index]) - self.starts[index]
        return self.offsets[index] + inside

    def shows(self, time_s: float) -> bool:
        """Returns whether the time is inside a period of activity, or shortly after one."""
        pieces = zip(self.starts, self.ends, strict=True)
        return any(start <= time_s <= end + PAUSE_SHOWN_S for start, end in pieces)

    def length_s(self) -> float:
        return self.offsets[-1] + self.ends[-1] - self.starts[-1]


def timeline_rows(history: RunHistory) -> list[TimelineRow]:
    """Returns the trainer's steps, then up to `ROWS_MAX` rollouts by name."""
    deaths = history.deaths()

    def died(name: str) -> tuple[float, ...]:
        return tuple(float(event["time_s"]) for event in deaths if event.get("role") == name)

    steps = tuple(
        TimelineBar(done.time_s - done.metrics.get("seconds", 0.0), done.time_s, done.step)
        for _, done in sorted(history.steps.items())
    )
    rows = [TimelineRow("trainer", steps, deaths_s=died("trainer"))]
    span = history.span_s()
    for name, rollout in sorted(history.rollouts.items())[:ROWS_MAX]:
        share = rollout.idle_s() / max(1e-9, span[1] - span[0]) if span else 0.0
        pulls = tuple(sorted(rollout.serving, key=lambda served: served.time_s)[1:])
        note = f"{min(1.0, share):.0%} idle"
        rows.append(TimelineRow(name, version_bars(rollout), note, died(name), pulls))
    return rows


def version_bars(rollout: RolloutHistory) -> tuple[TimelineBar, ...]:
    """Returns the rollout's generating times, split at each new version."""
    serving = sorted(rollout.serving, key=lambda served: served.time_s)
    if not serving:  # the records were truncated, in a run without an archive
        return ()
    ends = [served.time_s for served in serving[1:]] + [float("inf")]
    return tuple(
        TimelineBar(start, end, served.version)
        for served, until in zip(serving, ends, strict=True)
        for start, end in rollout.busy.within(served.time_s, until)
    )


def time_axis(rows: Sequence[TimelineRow]) -> TimeAxis | None:
    """Returns the axis over all bars, with pauses shortened; None without bars."""
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


def draw_timeline(history: RunHistory) -> str:
    """Returns one `<svg>`; "" if no tokens were generated or trained."""
    rows = timeline_rows(history)
    axis = time_axis(rows)
    if axis is None:
        return ""
    newest = max((bar.version for row in rows for bar in row.bars), default=0)
    parts = [_row(row, index, axis, newest) for index, row in enumerate(rows)]
    places = {row.name: index * ROW + ROW / 2 for index, row in enumerate(rows)}
    shown = [move for move in history.moves if axis.shows(move.time_s)]
    parts += move_arrows(shown, places, BAR / 2, lambda time_s: _x(axis.at(time_s), axis))
    return _drawing("Timeline of every rollout", parts, ROW * len(rows), axis)


def _drawing(label: str, parts: Sequence[str], rows_height: float, axis: TimeAxis) -> str:
    """Returns the rows above an axis of clock times as one `<svg>`."""
    height = rows_height + FOOT
    marks = (
        text(_x(value, axis), height - 6, clock(value), "tick mid")
        for value in ticks(0.0, axis.length_s(), 10)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join((*parts, *marks))}</svg>'
    )


def _row(row: TimelineRow, index: int, axis: TimeAxis, newest: int) -> str:
    top = index * ROW + (ROW - BAR) / 2
    middle = top + BAR / 2
    parts = _bars(row, top, BAR, axis, newest)
    parts += _pulls(row, top, axis)
    died = {round(_x(axis.at(death), axis)) for death in filter(axis.shows, row.deaths_s)}
    parts += (
        f'<path class="death" d="M{x - 5:d} {middle - 5:.1f}l10 10m0 -10l-10 10">'
        f"<title>{escape(row.name)} died</title></path>"
        for x in sorted(died)
    )
    return "".join(parts)


def _pulls(row: TimelineRow, top: float, axis: TimeAxis) -> Iterator[str]:
    """Yields a mark per pull. Yields none if there are so many that the marks would hide the bars;
    the bars' shades then show the versions.
    """
    shown = [pull for pull in row.pulls if axis.shows(pull.time_s)]
    for pull in shown if len(shown) <= MARKS_MAX else ():
        yield (
            f'<path class="pull" d="M{_x(axis.at(pull.time_s), axis):.1f} {top - 3:g}v{BAR + 6:g}">'
            f"<title>{escape(row.name)} took version {pull.version}</title></path>"
        )


def _bars(row: TimelineRow, top: float, high: float, axis: TimeAxis, newest: int) -> list[str]:
    """Draws the row's name, note and bars; the bars are shaded by version up to `newest`."""
    right = WIDTH - RIGHT
    parts = [
        text(0, top + high / 2 + 4, row.name, "label"),
        f'<path class="track" d="M{LEFT:g} {top:g}H{right:g}v{high:g}H{LEFT:g}z"/>',
        text(right + 8, top + high / 2 + 4, row.note, "tick"),
    ]
    if len(row.bars) > MARKS_MAX:
        return [*parts, *_thin_bars(row, top, high, axis, newest)]
    for bar in row.bars:
        x, end = _x(axis.at(bar.start_s), axis), _x(axis.at(bar.end_s), axis)
        shade = _shade(bar.version, newest)
        title = f"{row.name}, version {bar.version}, {bar.end_s - bar.start_s:.1f} s"
        parts.append(
            f'<rect class="v{shade}" x="{x:.2f}" y="{top:g}" width="{max(0.4, end - x - 0.6):.2f}" '
            f'height="{high:g}"><title>{escape(title)}</title></rect>'
        )
    return parts


def _thin_bars(
    row: TimelineRow, top: float, high: float, axis: TimeAxis, newest: int
) -> Iterator[str]:
    """Yields a path per shade, which covers the pixels whose newest bar has that shade."""
    shades: dict[int, int] = {}  # pixel → shade of the newest version in it
    for bar in row.bars:
        x, end = _x(axis.at(bar.start_s), axis), _x(axis.at(bar.end_s), axis)
        for pixel in range(int(x), max(int(x) + 1, round(end))):
            shades[pixel] = max(shades.get(pixel, 0), _shade(bar.version, newest))
    paths: dict[int, list[str]] = {}
    numbered = enumerate(sorted(shades))  # pixel − index is equal for adjacent pixels
    for (_, shade), run in groupby(numbered, lambda one: (one[1] - one[0], shades[one[1]])):
        pixels = [pixel for _, pixel in run]
        d = f"M{pixels[0]} {top:g}h{len(pixels)}v{high:g}h-{len(pixels)}z"
        paths.setdefault(shade, []).append(d)
    title = escape(f"{row.name}, {len(row.bars)} periods of versions")
    for shade, found in sorted(paths.items()):
        yield f'<path class="v{shade}" d="{"".join(found)}"><title>{title}</title></path>'


def _shade(version: int, newest: int) -> int:
    return min(SHADES - 1, version * SHADES // (newest + 1))


def _x(shown_s: float, axis: TimeAxis) -> float:
    return LEFT + shown_s / max(1e-9, axis.length_s()) * (WIDTH - LEFT - RIGHT)


SIMULATED_ROW, SIMULATED_BAR = 22.0, 14.0
ROWS_SHOWN, ARROWS_SHOWN = 24, 600
MARKS = """<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5"
 markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z" fill="var(--c2)"/></marker></defs>"""


def write_simulated(runs: Sequence["PolicyRun"], path: Path) -> None:
    """Write one page with all simulated runs."""
    body = [
        heading(
            "Simulated cluster", "virtual time; docs/explanation/simulator.md describes the model"
        )
    ]
    if runs:
        best = max(runs, key=lambda run: run.result.tokens_per_s)
        body.append(tiles([("runs", str(len(runs))), ("fastest", best.result.policy)]))
    body.append(wide("Policies", "speed is trained tokens per second", _summary(runs)))
    for run in runs:
        title = f"{run.result.policy}, {run.cluster.model} on {run.cluster.gpus} GPUs"
        body.append(wide(title, _result_text(run.result), draw_simulation(run.result)))
    path.write_text(page("Simulated cluster", body), encoding="utf-8")


def draw_simulation(result: "SimulationResult") -> str:
    """Returns the timeline as one `<svg>`: the trainer's steps, then the rollouts."""
    steps = tuple(TimelineBar(step.begun_s, step.ended_s, step.number) for step in result.steps)
    rows = [TimelineRow("trainer", steps)]
    for row in result.rows[:ROWS_SHOWN]:
        rows.append(TimelineRow(row.name, tuple(TimelineBar(*bar) for bar in row.bars)))
    newest = max((step.number for step in result.steps), default=1)
    axis = TimeAxis((0.0,), (max(result.seconds, 1e-9),), (0.0,))
    tops = {row.name: index * SIMULATED_ROW + 4 for index, row in enumerate(rows)}
    parts = [MARKS]
    for row in rows:
        parts += _bars(row, tops[row.name], SIMULATED_BAR, axis, newest)
    shown = [a for a in result.arrows if a.source in tops and a.target in tops]
    parts += [_arrow(arrow, tops, axis) for arrow in shown[:ARROWS_SHOWN]]
    return _drawing(f"Timeline of {result.policy}", parts, SIMULATED_ROW * len(rows), axis)


def _summary(runs: Sequence["PolicyRun"]) -> str:
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


def _result_text(result: "SimulationResult") -> str:
    counts = result.counts
    return (
        f"{result.tokens_per_s:,.0f} trained tokens per second, a step in {result.step_s:.1f} s; "
        f"{counts.moves} moves, {counts.pulls} pulls, {counts.failures} rollouts died; "
        f"the first {min(len(result.rows), ROWS_SHOWN)} rollouts are drawn"
    )


def _arrow(arrow: "TimelineArrow", tops: Mapping[str, float], axis: TimeAxis) -> str:
    x, to_x = _x(axis.at(arrow.from_s), axis), _x(axis.at(arrow.to_s), axis)
    y, to_y = (tops[name] + SIMULATED_BAR / 2 for name in (arrow.source, arrow.target))
    title = f"<title>{arrow.kind}, {escape(arrow.source)} at {clock(arrow.from_s)}</title>"
    if arrow.kind == "move":
        return (
            f'<path class="line c2" style="stroke-width:1" marker-end="url(#tip)" '
            f'd="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}">{title}</path>'
        )
    colour = "c3" if arrow.kind == "pull" else "c5"
    y, end = y + SIMULATED_BAR / 2, max(to_x, x + 1.5)
    return f'<path class="line {colour}" d="M{x:.1f} {y:.1f}H{end:.1f}">{title}</path>'
