"""The live view of `rollstream run`: a redrawn table on a terminal, lines otherwise."""

import time
from collections.abc import Sequence
from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live

from rollstream.live.frame import Size, render
from rollstream.live.look import Onlooker
from rollstream.live.snapshot import Snapshot
from rollstream.live.table import plain
from rollstream.supervisor import RoleState

LOOK_S = 1.0  # a look costs about 5 ms of a core that the run would rather have
LINE_S, LINE_LOOK_S = 10.0, 5.0  # between two lines, and looks, where nothing can be redrawn


class LiveView:
    """Call `show` often; it looks and draws when it is time. Runs in one thread."""

    def __init__(self, onlooker: Onlooker, console: Console, as_json: bool) -> None:
        self._onlooker, self._console, self._as_json = onlooker, console, as_json
        self._looked_s = 0.0
        self._said_s = 0.0
        self._said_step = -1
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
        """Look and draw, if it is time."""
        now = time.monotonic()
        if now - self._looked_s < (LOOK_S if self._live or self._as_json else LINE_LOOK_S):
            return
        self._looked_s = now
        shown = self._onlooker.look(roles)
        if self._live:
            size = Size(self._console.width, self._console.height)
            self._live.update(render(shown, size, detailed=False), refresh=True)
        elif self._is_news(shown, now):
            self._said_s, self._said_step = now, shown.step
            line = msgspec.json.encode(shown).decode() if self._as_json else plain(shown)
            print(line, flush=True)

    def _is_news(self, shown: Snapshot, now: float) -> bool:
        """For programs every step, for people a line now and then."""
        if self._as_json:
            return shown.step != self._said_step
        return now - self._said_s >= LINE_S
