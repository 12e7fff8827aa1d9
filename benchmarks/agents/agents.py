"""NAME agents: episodes of agents, environments that wait, and the sandbox of programs."""

from collections.abc import Iterator

from benchmarks.agents import escapes, http, kills, redundancy, slots, tokens, unchanged
from benchmarks.case import Case


def cases(quick: bool) -> Iterator[Case]:
    for module in (http, tokens, kills, slots, redundancy, escapes, unchanged):
        yield from module.cases(quick)
