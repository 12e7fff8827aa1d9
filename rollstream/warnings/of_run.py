"""The warnings of a run as its log stands, for those who read about it later.

The clock is that of the newest record: a run is not silent because its report is written next week.
"""

from pathlib import Path

from rollstream.live.feed import Feed
from rollstream.live.plan import Plan
from rollstream.live.snapshot import snapshot
from rollstream.warnings.all import concerns_of
from rollstream.warnings.concern import Concern
from streams.bus import Bus
from streams.deadline import Deadline

READ_S = 20.0  # what is read is bounded (`Feed`); this is for a bus that does not answer


def concerns_at_end(bus: Bus, metrics: Path, plan: Plan) -> tuple[Concern, ...]:
    """What `rollstream top` would have warned of when the newest record was written."""
    state, feed, deadline = plan.state(), Feed(bus, metrics), Deadline(READ_S)
    while feed.follow(state, 0.0) and not deadline.passed():
        pass
    return concerns_of(snapshot(state, plan, max(state.newest_s.values(), default=0.0)))
