"""Chains the cases of `one_reading`."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.one_reading import claims_checked, folders, resume_settings, templates


def cases(quick: bool) -> Iterator[Case]:
    for module in (templates, folders, resume_settings, claims_checked):
        yield from module.cases(quick)
