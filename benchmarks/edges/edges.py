"""NAME edges: a run of somebody else, and text from agents."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.edges import deaths, files, memory, own, parsers


def cases(quick: bool) -> Iterator[Case]:
    for module in (memory, own, files, parsers, deaths):
        yield from module.cases(quick)
