"""Real sizes: the plan against measured memory, then the memory of a sharded trainer's ranks and of
a rollout that takes a version.
"""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.sizes import plan_error, rank_memory, rollout_memory


def cases(quick: bool) -> Iterator[Case]:
    """Yields `plan_error`, `rank_memory`, then `rollout_memory`."""
    yield from plan_error.cases(quick)
    yield from rank_memory.cases(quick)
    yield from rollout_memory.cases(quick)
