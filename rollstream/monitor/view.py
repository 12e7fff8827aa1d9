"""The live view of `rollstream run`, and the quit keys of `rollstream top`.

On a terminal the view redraws a frame; elsewhere it prints lines.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from rollstream.monitor.frame import TerminalSize, render_frame
from rollstream.monitor.observer import RunObserver
from rollstream.monitor.snapshot import RunSnapshot
from rollstream.monitor.table import plain_line
from rollstream.supervisor.supervisor import RoleState

REFRESH_S = 1.0  # one refresh costs about 5 ms of a core that the run needs
LINE_S, LINE_REFRESH_S = 10.0, 5.0  # between two lines and two refreshes without a terminal


class LiveView:
    """Call `show` often, from one thread; it refreshes at most once per interval."""

    def __init__(self, onlooker: RunObserver, console: Console, as_json: bool) -> None:
        self._onlooker, self._console, self._as_json = onlooker, console, as_json
        self._refreshed_s = 0.0
        self._printed_s = 0.0
        self._printed_step = -1
        self._live: Live | None = None

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal and not self._as_json:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, roles: Sequence[RoleState]) -> None:
        """Refresh and draw, if the refresh interval has passed."""
        now = time.monotonic()
        if now - self._refreshed_s < (REFRESH_S if self._live or self._as_json else LINE_REFRESH_S):
            return
        self._refreshed_s = now
        shown = self._onlooker.observe(roles)
        if self._live:
            size = TerminalSize(self._console.width, self._console.height)
            self._live.update(render_frame(shown, size, detailed=False), refresh=True)
        elif self._is_due(shown, now):
            self._printed_s, self._printed_step = now, shown.step
            line = msgspec.json.encode(shown).decode() if self._as_json else plain_line(shown)
            print(line, flush=True)

    def _is_due(self, shown: RunSnapshot, now: float) -> bool:
        """JSON output has one line per step, plain output one line per `LINE_S`."""
        if self._as_json:
            return shown.step != self._printed_step
        return now - self._printed_s >= LINE_S


QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04")  # also Ctrl-C and Ctrl-D if they arrive as bytes


class TerminalKeys:
    """Reads single keys without Enter; restores the terminal's mode on exit.

    Without a terminal as standard input no key is read, and `asked_to_quit` only waits.
    """

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if _is_terminal() else -1
        self._before: list[Any] | None = None

    def __enter__(self) -> "TerminalKeys":
        if self._file >= 0:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)  # Ctrl-C stays a signal
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def asked_to_quit(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds; returns True if a quit key was pressed."""
        watched = [] if self._file < 0 else [self._file]
        if not select.select(watched, [], [], wait_s)[0]:
            return False
        pressed = os.read(self._file, 64)
        return not pressed or any(
            key in pressed for key in QUIT_KEYS
        )  # no bytes: the terminal closed


def _is_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except ValueError:  # closed
        return False
