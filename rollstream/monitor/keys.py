"""Reads single keys from a terminal without Enter, and restores the terminal's mode on exit."""

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any

QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04")  # also Ctrl-C and Ctrl-D if they arrive as bytes


class TerminalKeys:
    """Without a terminal as standard input no key is read; `asked_to_quit` only waits."""

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
        return not pressed or any(key in pressed for key in QUIT_KEYS)  # no bytes: the terminal closed


def _is_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except ValueError:  # closed
        return False
