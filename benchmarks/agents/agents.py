"""NAME agents: episodes of agents, and the sandbox of their programs."""

from collections.abc import Iterator

from benchmarks.agents import escapes
from benchmarks.case import Case


def cases(quick: bool) -> Iterator[Case]:
    yield from escapes.cases(quick)
