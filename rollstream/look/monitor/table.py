"""The blocks of the live view as lines of text; `plain_line` is the snapshot as one line, for logs
and pipes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text

from rollstream.look.monitor.format import (
    SPARKS,
    age,
    clock,
    count,
    meter,
    share,
    short_number,
    shortened,
    wrap_parts,
)
from rollstream.look.monitor.rollouts import RolloutSnapshot, worst_first
from rollstream.look.monitor.rows import MetricRow, evaluation_text, lag_text
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning

# Width of the names at the left of metrics and lag.
NAME_COLUMNS = 11
# Width of one lag's bar and share.
LAG_COLUMNS = 7
# State of a rollout → the style in which it is drawn.
STATES = {
    "generating": "green",
    "draining": "yellow",
    "pulling": "cyan",
    "starting": "cyan",
    "leaving": "dim",
    "stalled": "yellow",
    "silent": "bold red",
}
# Most notes about roles that are shown; in `plain_line` also most warnings.
NOTES_MAX = 4


@dataclass(frozen=True, slots=True)
class RolloutColumn:
    """A column with one cell per rollout. `styles` has one entry per cell, or is empty."""

    head: str
    cells: Sequence[str]
    right: bool = True
    styles: Sequence[str] = ()


def metric_lines(rows: Sequence[MetricRow], columns: int) -> list[Text]:
    lines: list[Text] = []
    for row in rows:
        for index, words in enumerate(wrap_parts(row.parts, columns - NAME_COLUMNS)):
            line = Text.assemble((f"{'' if index else row.name:<{NAME_COLUMNS}}", "dim"), words)
            if not index and row.line:
                line.append(f"  {row.line}", "green")
            lines.append(line)
    return lines


def lag_lines(at: RunSnapshot, columns: int) -> list[Text]:
    """A head and two lines with the shares of the last trajectories' generated tokens by lag: when
    the trajectory finished, and when it was trained. Mean and maximum at the end of a line are
    those of the last step.
    """
    room = max(2, (columns - NAME_COLUMNS - 12) // LAG_COLUMNS)
    both = [*at.lag.finish, *at.lag.trained, at.plan.max_lag or 0]
    highest = min(max(both), room - 1)
    heads = [str(lag) for lag in range(highest + 1)]
    # Lags without a column of their own are in the last one.
    heads[-1] += "+" if max(both) > highest else ""
    head = "".join(f"{label:>{LAG_COLUMNS}}" for label in heads)
    lines = [Text(f"{'lag':<{NAME_COLUMNS}}{head}  mean   max", "dim")]
    for name, histogram, when in (
        ("at finish", at.lag.finish, "finish"),
        ("trained", at.lag.trained, "consumed"),
    ):
        line = Text.assemble((f"{name:<{NAME_COLUMNS}}", "dim"))
        for bar, percent in _shares(histogram, highest):
            line.append(f" {bar} ", "green").append(f"{percent:>{LAG_COLUMNS - 3}}")
        for figure, form in (("mean", ".1f"), ("max", ".0f")):
            value = at.metrics.get(f"lag_{when}_{figure}")
            line.append(f"{'–' if value is None else format(value, form):>6}")
        lines.append(line)
    return lines


def rollout_lines(lines: Sequence[RolloutSnapshot], columns: int, rows: int) -> list[Text]:
    """A head and a line per rollout, the worst ones of more than `rows`: the widest of
    `_table_variants` that fits `columns`, else the narrowest.
    """
    if not lines:
        return [Text("rollouts   none yet", "dim")]
    shown = list(lines) if len(lines) <= rows else worst_first(lines)[: max(1, rows)]
    table = next(
        (table for table in _table_variants(shown) if _width(table) <= columns),
        _table_variants(shown)[-1],
    )
    drawn = [_table_line([c.head for c in table], table, ["dim"] * len(table))]
    for index in range(len(shown)):
        styles = [column.styles[index] if column.styles else "" for column in table]
        drawn.append(_table_line([column.cells[index] for column in table], table, styles))
    if len(shown) < len(lines):
        drawn.append(Text(f"… and {len(lines) - len(shown)} more (the worst are shown)", "dim"))
    return drawn


def warning_lines(
    warnings: Sequence[RunWarning], columns: int, warnings_max: int, advice: bool
) -> list[Text]:
    lines: list[Text] = []
    for warning in warnings[:warnings_max]:
        for index, words in enumerate(_wrapped(warning.what, columns - 2)):
            lines.append(Text(("  " if index else "! ") + words, "yellow"))
        do = _wrapped(f"→ {warning.do}", columns - 2) if advice else []
        lines += [Text(f"  {words}", "dim") for words in do]
    if len(warnings) > warnings_max:
        lines.append(Text(f"! {len(warnings) - warnings_max} more warnings", "yellow"))
    return lines


def plain_line(at: RunSnapshot) -> str:
    parts = [f"{clock(at.elapsed_s)} step {at.step}/{at.steps} {at.phase}"]
    if at.metrics:
        reward = at.metrics.get("reward_mean")
        parts.append(f"reward {'–' if reward is None else format(reward, '.3f')}")
        parts.append(f"lag {lag_text(at, 'consumed')}")
    if at.evaluation:
        parts.append(evaluation_text(at))
    if at.pace.recent_trained_per_s is not None:
        parts.append(f"trained {count(at.pace.recent_trained_per_s)} tok/s lately")
    parts.append(f"{at.queue.open_groups} groups open, {at.queue.ready_groups} ready")
    if at.restarts:
        parts.append(f"{at.restarts} restarts")
    warnings = (f"! {warning.what}" for warning in at.concerns[:NOTES_MAX])
    return " · ".join([*parts, *at.notes[-NOTES_MAX:], *warnings])


def _shares(histogram: Mapping[int, int], highest: int) -> list[tuple[str, str]]:
    counts = [histogram.get(lag, 0) for lag in range(highest)]
    # The last share includes all higher lags.
    counts.append(sum(n for lag, n in histogram.items() if lag >= highest))
    total = sum(counts)
    if not total:
        return [(" ", "–")] * len(counts)
    largest = max(counts)
    return [
        (
            SPARKS[round((len(SPARKS) - 1) * n / largest)] if n else " ",
            share(n / total) if n else "·",
        )
        for n in counts
    ]


def _table_variants(lines: Sequence[RolloutSnapshot]) -> list[list[RolloutColumn]]:
    name = RolloutColumn("rollout", [shortened(line.name, 16) for line in lines], False)
    filled = RolloutColumn("slots", [meter(line.running, line.slots, 6) for line in lines], False)
    slots = RolloutColumn("", [f"{line.running}/{line.slots}" for line in lines])
    waiting = RolloutColumn("wait", [str(line.waiting) for line in lines])
    kv_meter = RolloutColumn(
        "KV", [meter(line.kv_used, line.kv_capacity, 4) for line in lines], False
    )
    kv = RolloutColumn(
        "", [f"{short_number(line.kv_used)}/{short_number(line.kv_capacity)}" for line in lines]
    )
    marks = [f"v{line.version}{'✓' if line.verified else '!'}" for line in lines]
    version_styles = ["" if line.verified else "bold red" for line in lines]
    version = RolloutColumn("held", marks, True, version_styles)
    speed = RolloutColumn("tok/s", [short_number(line.tokens_per_s) for line in lines])
    idle = RolloutColumn("idle", [share(line.recent_idle_share) for line in lines])
    states = [f"silent {age(o.silent_s)}" if o.state == "silent" else o.state for o in lines]
    state = RolloutColumn("state", states, False, [STATES.get(line.state, "") for line in lines])
    slots_only, kv_only = RolloutColumn("slots", slots.cells), RolloutColumn("KV", kv.cells)
    return [
        [name, filled, slots, waiting, kv_meter, kv, version, speed, idle, state],
        [name, filled, slots, waiting, kv_only, version, speed, idle, state],
        [name, slots_only, waiting, kv_only, version, speed, idle, state],
        [name, slots_only, version, speed, state],
    ]


def _width(table: Sequence[RolloutColumn]) -> int:
    return sum(_column_width(column) for column in table) + 2 * (len(table) - 1)


def _column_width(column: RolloutColumn) -> int:
    return max(len(column.head), *(len(cell) for cell in column.cells))


def _table_line(
    cells: Sequence[str], table: Sequence[RolloutColumn], styles: Sequence[str]
) -> Text:
    line = Text()
    for index, (cell, column, style) in enumerate(zip(cells, table, styles, strict=True)):
        width = _column_width(column)
        line.append("  " if index else "")
        line.append(f"{cell:>{width}}" if column.right else f"{cell:<{width}}", style)
    line.rstrip()
    return line


def _wrapped(words: str, columns: int) -> list[str]:
    return wrap(words, columns, break_on_hyphens=False)
