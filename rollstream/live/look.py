"""One onlooker of one run: brings its state up to date and gives the figures of the moment.

It must never harm the run that it shows, nor end because of it: what cannot be read is said
(`Snapshot.trouble`), and the figures stay those of before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollstream.live.feed import Feed
from rollstream.live.plan import Plan
from rollstream.live.snapshot import Snapshot, snapshot
from rollstream.live.state import RunState
from rollstream.supervisor import RoleState
from rollstream.warnings.all import concerns_of
from streams.bus import Bus
from streams.deadline import Deadline
from streams.errors import RollstreamError

CATCH_UP_S = 0.5  # spent at most on an old run's log before the next frame is drawn


@dataclass(slots=True)
class Onlooker:
    """`open_bus` gives None while there is no log yet."""

    plan: Plan
    metrics: Path
    open_bus: Callable[[], Bus | None]
    clock: Callable[[], float]
    started_s: float | None = None
    is_behind: bool = True
    """There is more in the log that was not read yet."""
    state: RunState = field(init=False)
    _feed: Feed | None = None

    def __post_init__(self) -> None:
        self.state = self.plan.state()

    def look(self, roles: Sequence[RoleState] = (), catch_up_s: float = CATCH_UP_S) -> Snapshot:
        """What is there now, warnings included."""
        trouble = ""
        try:
            self._follow(Deadline(catch_up_s))
        except RollstreamError as error:
            trouble = f"the run cannot be read: {error}"
        shown = snapshot(self.state, self.plan, self.clock(), roles, self.started_s)
        return replace(shown, trouble=trouble, concerns=concerns_of(shown))

    def _follow(self, deadline: Deadline) -> None:
        if self._feed is None:
            bus = self.open_bus()
            if bus is None:
                self.is_behind = False
                return
            self._feed = Feed(bus, self.metrics)
        self.is_behind = True
        while self.is_behind:
            self.is_behind = self._feed.follow(self.state, self.clock())
            if deadline.passed():
                return
