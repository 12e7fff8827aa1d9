"""Chains the cases of `one_reading`."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.one_reading import claims_checked, folders, resume_settings, templates


def cases(quick: bool) -> Iterator[Case]:
    # Claims first: a case that is measured makes the tables stale until pages are written again.
    for module in (claims_checked, templates, folders, resume_settings):
        yield from module.cases(quick)
