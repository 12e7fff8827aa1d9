"""Draws a `RunSnapshot` as one frame. One that is too high has less detail, level by level of
`DETAIL_LEVELS`, and as many rollouts as fit, the worst ones.
"""

import logging
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollstream.look.monitor import table
from rollstream.look.monitor.format import clock
from rollstream.look.monitor.observer import RunObserver
from rollstream.look.monitor.rows import metric_rows
from rollstream.look.monitor.snapshot import RunSnapshot
from rollstream.printable import protect_output
from rollstream.run.supervisor.supervisor import RoleState

log = logging.getLogger(__name__)

# From this width on, metrics and rollouts are side by side.
WIDE_COLUMNS = 140
# Columns of frame and padding.
BORDER = 4
# Columns between metrics and rollouts.
GAP = 3
# A narrower terminal cuts the frame off.
COLUMNS_MIN = 20
# A level of detail is used only if it leaves room for this many rollouts.
ROWS_MIN = 4
# Rollouts if the height is unknown.
ROWS_MAX = 16


@dataclass(frozen=True, slots=True)
class DetailLevel:
    """Metrics of rank 0 (the most important ones) to `rank`, and at most `warnings` warnings, with
    or without their advice.
    """

    rank: int
    warnings: int
    advice: bool = True
    is_spaced: bool = False


DETAIL_LEVELS = (
    DetailLevel(2, 8, is_spaced=True),
    DetailLevel(2, 8),
    DetailLevel(1, 4),
    DetailLevel(1, 4, advice=False),
    DetailLevel(0, 2, advice=False),
)


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """`lines` is None for a pipe."""

    columns: int
    lines: int | None = None


@dataclass(frozen=True, slots=True)
class FrameBody:
    """`figures` (the metrics) and `rollouts`, side by side if `is_wide`, and notes and warnings
    `below` them.
    """

    figures: list[Text]
    rollouts: list[Text]
    below: list[Text]
    is_wide: bool
    is_airy: bool

    def height(self) -> int:
        middle = [len(self.figures), len(self.rollouts)]
        high = max(middle) if self.is_wide else sum(middle) + self.is_airy
        return 3 + self.is_airy + high + len(self.below) + (self.is_airy and bool(self.below))

    def fits(self, lines: int) -> bool:
        return self.height() <= lines


def render_frame(at: RunSnapshot, size: TerminalSize, detailed: bool = True) -> RenderableType:
    """`detailed` adds lag histograms, ages and versions."""
    size = replace(size, columns=max(COLUMNS_MIN, size.columns))
    body = _fitting_body(at, size, detailed)
    parts: list[RenderableType] = [_progress(at, size.columns)]
    gap = [Text()] if body.is_airy else []
    if body.is_wide:
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=(size.columns - BORDER - GAP) // 2)
        grid.add_column()
        grid.add_row(Group(*body.figures), Group(*body.rollouts))
        parts += [*gap, grid]
    else:
        parts += [*gap, *body.figures, *gap, *body.rollouts]
    parts += [*gap, *body.below] if body.below else []
    return Panel(
        Group(*parts),
        title=Text.assemble(("rollstream", "bold"), f" · {at.title}"),
        title_align="left",
        subtitle=_subtitle(at),
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
    )


def _fitting_body(at: RunSnapshot, size: TerminalSize, detailed: bool) -> FrameBody:
    fewest = min(len(at.rollouts), ROWS_MIN)
    high = size.lines
    fitting = (
        v for v in DETAIL_LEVELS if not high or _body(at, size, detailed, v, fewest).fits(high)
    )
    # A terminal too low for the last level cuts the frame off.
    level = next(fitting, DETAIL_LEVELS[-1])
    rows = len(at.rollouts) if high else ROWS_MAX
    body = _body(at, size, detailed, level, rows)
    over = body.height() - high if high else 0
    # One more line is needed for the number of hidden rollouts.
    if over > 0:
        body = _body(at, size, detailed, level, max(1, len(body.rollouts) - 2 - over))
    return body


def _body(
    at: RunSnapshot, size: TerminalSize, detailed: bool, level: DetailLevel, rows: int
) -> FrameBody:
    inside = size.columns - BORDER
    is_wide = size.columns >= WIDE_COLUMNS
    left_columns = (inside - GAP) // 2 if is_wide else inside
    right_columns = inside - GAP - left_columns if is_wide else inside
    figures = table.metric_lines(
        [row for row in metric_rows(at, detailed) if row.rank <= level.rank], left_columns
    )
    if detailed:
        figures += [*([Text()] if level.is_spaced else []), *table.lag_lines(at, left_columns)]
    below = [Text(f"! {words}", "yellow") for words in at.notes[-table.NOTES_MAX :]]
    below += table.warning_lines(at.concerns, inside, level.warnings, level.advice)
    return FrameBody(
        figures,
        table.rollout_lines(at.rollouts, right_columns, rows),
        below,
        is_wide,
        level.is_spaced,
    )


def _progress(at: RunSnapshot, columns: int) -> Table:
    remaining = "" if at.pace.left_s is None else f"{clock(at.pace.left_s)} left"
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right", min_width=10)
    bar = ProgressBar(
        total=max(1, at.steps),
        completed=at.step,
        width=max(10, columns - 44),
        complete_style="green",
        finished_style="green",
    )
    label = Text.assemble("step ", (f"{at.step}", "bold"), f" of {at.steps}")
    line.add_row(label, bar, Text(remaining, style="dim"))
    return line


def _subtitle(at: RunSnapshot) -> Text:
    subtitle = Text()
    if at.restarts:
        word = "restart" if at.restarts == 1 else "restarts"
        subtitle.append(f"{at.restarts} {word}", "yellow").append(" · ")
    return subtitle.append(f"{at.phase} · {clock(at.elapsed_s)}")


# One refresh costs about 5 ms of a core that the run needs.
REFRESH_S = 1.0
# Between two lines without a terminal; a refresh over Kafka costs some 40 requests.
LINE_S = 10.0


class LiveView:
    """A frame that is redrawn on a terminal, otherwise lines of text, or with `as_json` JSON lines,
    at most one per step and none while `observer` catches up. Within a `with` block call `show`
    often, from one thread: it refreshes at most once per interval.
    """

    def __init__(self, observer: RunObserver, console: Console, as_json: bool) -> None:
        self.observer, self._console, self._as_json = observer, console, as_json
        self._refreshed_s = 0.0
        self._printed_step = -1
        self._live: Live | None = None
        self._noted: set[type[Exception]] = set()

    def __enter__(self) -> "LiveView":
        console = self._console
        if console.is_terminal and not console.is_dumb_terminal and not self._as_json:
            self._live = Live(console=console, auto_refresh=False, transient=False)
            self._live.start()
            # rich passes printed text on, and takes escape sequences for style.
            protect_output()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live:
            with self._harmless():
                self._live.stop()

    def show(self, roles: Sequence[RoleState]) -> None:
        """If the refresh interval has passed. A failure does not end the run: it is logged once, by
        the kind of its error.
        """
        with self._harmless():
            self._show(roles)

    @contextmanager
    def _harmless(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  what cannot be shown must not end the run
            if type(error) not in self._noted:
                self._noted.add(type(error))
                log.warning(
                    "the live view failed: %s: %s; the run continues; see `rollstream top`",
                    type(error).__name__, error,
                )  # fmt: skip

    def _show(self, roles: Sequence[RoleState]) -> None:
        now, is_often = time.monotonic(), self._live or self._as_json or self.observer.is_behind
        if now - self._refreshed_s < (REFRESH_S if is_often else LINE_S):
            return
        self._refreshed_s = now
        shown = self.observer.observe(roles)
        if self._live:
            size = TerminalSize(self._console.width, self._console.height)
            self._live.update(render_frame(shown, size, detailed=False), refresh=True)
        elif not self.observer.is_behind and not (
            self._as_json and shown.step == self._printed_step
        ):
            self._printed_step = shown.step
            line = msgspec.json.encode(shown).decode() if self._as_json else table.plain_line(shown)
            print(line, flush=True)


# Also Ctrl-C and Ctrl-D if they arrive as bytes.
QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04")


class TerminalKeys:
    """Reads keys without Enter; restores the terminal's mode on exit. If standard input is no
    terminal, `asked_to_quit` only waits.
    """

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if _is_terminal() else -1
        self._before: list[Any] | None = None

    def __enter__(self) -> "TerminalKeys":
        if self._file >= 0:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)  # Ctrl-C stays a signal
        return self

    def __exit__(self, *raised: object) -> None:
        if self._before is not None:
            # The terminal is gone.
            with suppress(termios.error):
                termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def asked_to_quit(self, wait_s: float) -> bool:
        watched = [] if self._file < 0 else [self._file]
        if not select.select(watched, [], [], wait_s)[0]:
            return False
        try:
            pressed = os.read(self._file, 64)
        except OSError:  # the terminal is gone
            return True
        # No bytes mean that the terminal closed.
        return not pressed or any(key in pressed for key in QUIT_KEYS)


def _is_terminal() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.isatty()  # pyright: ignore[reportUnnecessaryComparison]
    except ValueError:  # closed
        return False
