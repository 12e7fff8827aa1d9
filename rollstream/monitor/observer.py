"""Observes one run: brings a `RunState` up to date and returns a snapshot of its metrics.

An observer never writes to the run. A read error does not end it: the error appears in
`Snapshot.trouble` and the metrics keep their previous values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollstream.monitor.feed import RunFeed
from rollstream.monitor.plan import RunSettings
from rollstream.monitor.snapshot import RunSnapshot, take_snapshot
from rollstream.monitor.state import RunState
from rollstream.supervisor.supervisor import RoleState
from rollstream.monitor.all import warnings_of
from rollstream.streams.bus import Bus
from rollstream.deadline import Deadline
from rollstream.errors import RollstreamError

CATCH_UP_S = 0.5  # longest read of an old run's log between two frames


@dataclass(slots=True)
class RunObserver:
    """`open_bus` returns None while the run has no log."""

    plan: RunSettings
    metrics: Path
    open_bus: Callable[[], Bus | None]
    clock: Callable[[], float]
    started_s: float | None = None
    is_behind: bool = True
    """The log holds records that were not read yet."""
    state: RunState = field(init=False)
    _feed: RunFeed | None = None

    def __post_init__(self) -> None:
        self.state = self.plan.state()

    def observe(self, roles: Sequence[RoleState] = (), catch_up_s: float = CATCH_UP_S) -> RunSnapshot:
        """Read records for up to `catch_up_s` seconds; returns the present metrics and warnings."""
        trouble = ""
        try:
            self._catch_up(Deadline(catch_up_s))
        except RollstreamError as error:
            trouble = f"the run cannot be read: {error}"
        shown = take_snapshot(self.state, self.plan, self.clock(), roles, self.started_s)
        return replace(shown, trouble=trouble, concerns=warnings_of(shown))

    def _catch_up(self, deadline: Deadline) -> None:
        if self._feed is None:
            bus = self.open_bus()
            if bus is None:
                self.is_behind = False
                return
            self._feed = RunFeed(bus, self.metrics)
        self.is_behind = True
        while self.is_behind:
            self.is_behind = self._feed.follow(self.state, self.clock())
            if deadline.passed():
                return
