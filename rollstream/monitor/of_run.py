"""The warnings of a run at the end of its log, for the report.

The time is that of the newest record: a report written a week later does not call the run silent.
"""

from pathlib import Path

from rollstream.monitor.feed import RunFeed
from rollstream.monitor.plan import RunSettings
from rollstream.monitor.snapshot import take_snapshot
from rollstream.monitor.all import warnings_of
from rollstream.monitor.concern import RunWarning
from rollstream.streams.bus import Bus
from rollstream.deadline import Deadline

READ_S = 20.0  # `RunFeed` bounds the records; this bounds the wait for an unresponsive bus


def warnings_at_end(bus: Bus, metrics: Path, plan: RunSettings) -> tuple[RunWarning, ...]:
    """Returns the warnings that `rollstream top` showed when the newest record was written."""
    state, feed, deadline = plan.state(), RunFeed(bus, metrics), Deadline(READ_S)
    while feed.follow(state, 0.0) and not deadline.passed():
        pass
    return warnings_of(take_snapshot(state, plan, max(state.newest_s.values(), default=0.0)))
