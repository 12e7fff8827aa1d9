"""Chains the cases of `first_hour`."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.first_hour import advice, check, refusals, share


def cases(quick: bool) -> Iterator[Case]:
    for module in (check, refusals, share, advice):
        yield from module.cases(quick)
