"""The cost of the promise that the log is the run (docs/explanation/exactly-once.md), without
kills: reading an archive for audit and replay, bytes of partials, and CPU time.
"""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.resume import promise_cost, promise_partials, promise_reads


def cases(quick: bool) -> Iterator[Case]:
    """`audit_read`, `replay_read`, `partials_amplification`, `promise_cost`."""
    for module in (promise_reads, promise_partials, promise_cost):
        yield from module.cases(quick)
