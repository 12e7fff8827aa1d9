"""NAME agents: episodes of agents, their environments, and the sandbox of their programs."""

from collections.abc import Iterator

from benchmarks.agents import escapes, http, kills, redundancy, slots, tokens
from benchmarks.case import Case


def cases(quick: bool) -> Iterator[Case]:
    for module in (http, tokens, kills, escapes, slots, redundancy):
        yield from module.cases(quick)
