"""The page of a simulation: one timeline per simulated run, with weight pulls and repack moves.

Rollouts are drawn as bars by version, as in a run's report. A move is an arrow from source to
destination, a pull a short mark, a drain a tick.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rollstream.monitor.format import clock
from rollstream.report.charts import text, ticks
from rollstream.report.page import heading, page, table, tiles, wide
from rollstream.simulator.experiment import PolicyRun
from rollstream.simulator.results import SimulationResult, TimelineArrow

WIDTH, LEFT, RIGHT, ROW, BAR, FOOT = 1160.0, 96.0, 24.0, 22.0, 14.0, 24.0
SHADES = 10
ROWS_SHOWN, ARROWS_SHOWN = 24, 600
MARKS = """<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5"
 markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z" fill="var(--c2)"/></marker></defs>"""


def write_simulated(runs: Sequence[PolicyRun], path: Path) -> None:
    """Write one page of all simulated runs."""
    body = [
        heading(
            "Simulated cluster", "virtual time; docs/explanation/simulator.md says what is modelled"
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


def draw_simulation(result: SimulationResult) -> str:
    """Returns the timeline as one `<svg>`: the trainer's steps, then the rollouts."""
    rows = result.rows[:ROWS_SHOWN]
    places = {row.name: index + 1 for index, row in enumerate(rows)}
    newest = max((step.number for step in result.steps), default=1)
    length_s = max(result.seconds, 1e-9)
    steps = tuple((step.begun_s, step.ended_s, step.number) for step in result.steps)
    parts = [MARKS, _row("trainer", steps, 0, length_s, newest)]
    parts += [_row(row.name, row.bars, places[row.name], length_s, newest) for row in rows]
    seen = [a for a in result.arrows if a.source in places and a.target in places]
    parts += [_arrow(arrow, places, length_s) for arrow in seen[:ARROWS_SHOWN]]
    height = ROW * (len(rows) + 1) + FOOT
    for value in ticks(0.0, length_s, 10):
        parts.append(text(_x(value, length_s), height - 6, clock(value), "tick mid"))
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="Timeline of {escape(result.policy, quote=True)}">{"".join(parts)}</svg>'
    )


def _summary(runs: Sequence[PolicyRun]) -> str:
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


def _result_text(result: SimulationResult) -> str:
    counts = result.counts
    return (
        f"{result.tokens_per_s:,.0f} trained tokens per second, a step in {result.step_s:.1f} s; "
        f"{counts.moves} moves, {counts.pulls} pulls, {counts.failures} rollouts died; "
        f"the first {min(len(result.rows), ROWS_SHOWN)} rollouts are drawn"
    )


def _row(
    name: str,
    bars: Sequence[tuple[float, float, int]],
    index: int,
    length_s: float,
    newest: int,
) -> str:
    top = index * ROW + (ROW - BAR) / 2
    parts = [
        text(0, top + BAR - 3, name, "label"),
        f'<path class="track" d="M{LEFT:g} {top:g}H{WIDTH - RIGHT:g}v{BAR:g}H{LEFT:g}z"/>',
    ]
    for begin_s, end_s, version in bars:
        x, end = _x(begin_s, length_s), _x(end_s, length_s)
        shade = min(SHADES - 1, version * SHADES // (newest + 1))
        title = f"{name}, version {version}, {clock(begin_s)} to {clock(end_s)}"
        parts.append(
            f'<rect class="v{shade}" x="{x:.2f}" y="{top:g}" width="{max(0.4, end - x):.2f}" '
            f'height="{BAR:g}"><title>{escape(title)}</title></rect>'
        )
    return "".join(parts)


def _arrow(arrow: TimelineArrow, places: dict[str, int], length_s: float) -> str:
    x, to_x = _x(arrow.from_s, length_s), _x(arrow.to_s, length_s)
    y, to_y = (places[name] * ROW + ROW / 2 for name in (arrow.source, arrow.target))
    title = f"<title>{arrow.kind}, {escape(arrow.source)} at {clock(arrow.from_s)}</title>"
    if arrow.kind == "move":
        return (
            f'<path class="line c2" style="stroke-width:1" marker-end="url(#tip)" '
            f'd="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}">{title}</path>'
        )
    colour = "c3" if arrow.kind == "pull" else "c5"
    end = max(to_x, x + 1.5)
    return f'<path class="line {colour}" d="M{x:.1f} {y + BAR / 2:.1f}H{end:.1f}">{title}</path>'


def _x(time_s: float, length_s: float) -> float:
    return LEFT + time_s / length_s * (WIDTH - LEFT - RIGHT)
