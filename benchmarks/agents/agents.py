"""All cases of agents and environments (`python -m benchmarks agents`)."""

from collections.abc import Iterator

from benchmarks.agents import redundancy, slots
from benchmarks.case import Case


def cases(quick: bool) -> Iterator[Case]:
    yield from slots.cases(quick)
    yield from redundancy.cases(quick)
