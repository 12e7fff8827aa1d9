"""NAME agents: episodes of agents, and the sandbox of their programs."""

from collections.abc import Iterator

from benchmarks.agents import escapes, http, kills, tokens
from benchmarks.case import Case


def cases(quick: bool) -> Iterator[Case]:
    for module in (http, tokens, kills, escapes):
        yield from module.cases(quick)
