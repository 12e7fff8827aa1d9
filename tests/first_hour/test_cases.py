"""Everything that people bring in their first hour ends as it should (`testbed/first_hour/`)."""

from pathlib import Path

import pytest

from testbed.first_hour.case import FirstHourCase
from testbed.first_hour.cases import CASES


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.is_slow else [])
        for case in CASES
    ],
)
def test_it_ends_as_it_should(case: FirstHourCase, tmp_path: Path):
    assert case.fault(tmp_path) == ""


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
