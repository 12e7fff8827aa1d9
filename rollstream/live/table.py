"""Drawing a snapshot for a terminal: one column of blocks, or two where there is room."""

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollstream.live.snapshot import RolloutLine, Snapshot

WIDE = 140  # columns from which figures and rollouts stand side by side
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 24
STATES = {
    "generating": "green",
    "draining": "yellow",
    "pulling": "cyan",
    "starting": "cyan",
    "leaving": "dim",
    "silent": "bold red",
}
NOTES_MAX = 4
ROLLOUTS_MAX = 16


def render(snapshot: Snapshot, width: int) -> RenderableType:
    """The whole view, for a terminal of `width` columns."""
    figures, rollouts = _figures(snapshot), _rollouts(snapshot.rollouts)
    body: RenderableType
    if width >= WIDE:
        grid = Table.grid(padding=(0, 4), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(figures, rollouts)
        body = grid
    else:
        body = Group(figures, Text(), rollouts)
    parts: list[RenderableType] = [_progress(snapshot, width), Text(), body]
    parts += [Text(f"! {note}", style="yellow") for note in snapshot.notes[-NOTES_MAX:]]
    right = f"{snapshot.phase} · {clock(snapshot.seconds)}"
    return Panel(
        Group(*parts),
        title=f"[bold]rollstream[/] · {snapshot.title}",
        title_align="left",
        subtitle=_subtitle(snapshot, right),
        subtitle_align="right",
        border_style="dim",
        padding=(1, 2),
    )


def plain(snapshot: Snapshot) -> str:
    """One line, for logs and terminals that cannot redraw."""
    parts = [f"{clock(snapshot.seconds)} step {snapshot.step}/{snapshot.steps} {snapshot.phase}"]
    if snapshot.metrics:
        parts.append(f"reward {_metric(snapshot, 'reward_mean', '.3f')}")
        parts.append(f"lag {_metric(snapshot, 'lag_consumed_mean', '.1f')}")
    if snapshot.evaluation:
        parts.append(_evaluation(snapshot))
    if snapshot.trained_per_s is not None:
        parts.append(f"trained {_count(snapshot.trained_per_s)} tok/s")
    parts.append(f"{snapshot.open_groups} groups open, {snapshot.ready_groups} ready")
    if snapshot.restarts:
        parts.append(f"{snapshot.restarts} restarts")
    return " · ".join([*parts, *snapshot.notes[-NOTES_MAX:]])


def clock(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def spark(values: tuple[float, ...], columns: int = SPARK_COLUMNS) -> str:
    """The last values as bars between their least and their greatest."""
    shown = values[-columns:]
    if len(shown) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / max(1e-9, high - low)
    return "".join(SPARKS[round((value - low) * scale)] for value in shown)


def _progress(snapshot: Snapshot, width: int) -> Table:
    left = "" if snapshot.left_s is None else f"{clock(snapshot.left_s)} left"
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right", min_width=10)
    bar = ProgressBar(
        total=max(1, snapshot.steps),
        completed=snapshot.step,
        width=max(10, width - 44),
        complete_style="green",
        finished_style="green",
    )
    label = Text.assemble("step ", (f"{snapshot.step}", "bold"), f" of {snapshot.steps}")
    line.add_row(label, bar, Text(left, style="dim"))
    return line


def _figures(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    reward = Text.assemble((_metric(snapshot, "reward_mean", ".3f"), "bold"), "  ")
    reward.append(spark(snapshot.rewards), style="green")
    table.add_row("reward", reward)
    table.add_row("accuracy", _evaluation(snapshot) or "–")
    trained = "–" if snapshot.trained_per_s is None else _count(snapshot.trained_per_s)
    generated = _count(snapshot.generated_per_s)
    table.add_row("tokens/s", f"{trained} trained · {generated} generated")
    table.add_row(
        "lag", f"{_lag(snapshot, 'finish')} at finish · {_lag(snapshot, 'consumed')} trained"
    )
    table.add_row("queue", f"{snapshot.open_groups} open · {snapshot.ready_groups} ready to train")
    lengths = [_metric(snapshot, f"length_{name}", ".0f") for name in ("median", "p99")]
    table.add_row("lengths", f"median {lengths[0]} · p99 {lengths[1]}")
    table.add_row("groups", " · ".join(f"{n} {why}" for why, n in snapshot.counts.items()) or "–")
    return table


def _rollouts(lines: tuple[RolloutLine, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rollout", no_wrap=True)
    table.add_column("slots", no_wrap=True)
    for name in ("version", "tokens/s", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for line in lines[:ROLLOUTS_MAX]:
        used = Text.assemble((_meter(line.running, line.slots), "green"))
        used.append(f" {line.running}/{line.slots}")
        table.add_row(
            line.name,
            used,
            f"v{line.version}",
            _count(line.tokens_per_s),
            f"{line.idle_share:.0%}",
            Text(line.state, style=STATES.get(line.state, "")),
        )
    more = f"and {len(lines) - ROLLOUTS_MAX} more" if len(lines) > ROLLOUTS_MAX else ""
    if more or not lines:
        table.add_row(Text(more or "none yet", style="dim"))
    return table


def _meter(used: int, total: int, columns: int = 8) -> str:
    full = round(columns * min(1.0, used / max(1, total)))
    return "█" * full + "░" * (columns - full)


def _subtitle(snapshot: Snapshot, right: str) -> str:
    if not snapshot.restarts:
        return right
    word = "restart" if snapshot.restarts == 1 else "restarts"
    return f"[yellow]{snapshot.restarts} {word}[/] · {right}"


def _evaluation(snapshot: Snapshot) -> str:
    line = snapshot.evaluation
    if not line:
        return ""
    sampled, greedy = line["accuracy_sampled"], line["accuracy_greedy"]
    return f"{sampled:.3f} sampled · {greedy:.3f} greedy, held out (v{line['step']:.0f})"


def _lag(snapshot: Snapshot, when: str) -> str:
    mean = _metric(snapshot, f"lag_{when}_mean", ".1f")
    return f"{mean} (max {_metric(snapshot, f'lag_{when}_max', '.0f')})"


def _metric(snapshot: Snapshot, name: str, form: str) -> str:
    value = snapshot.metrics.get(name)
    return "–" if value is None else format(value, form)


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")
