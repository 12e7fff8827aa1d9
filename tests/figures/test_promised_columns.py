"""Views keep their promise: every column has a line with its type and the release since which it is
stable, and nothing that a release had vanishes or changes its type.
"""

import json
import re

import pytest

from rollstream.look.figures.columns import COLUMNS
from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.look.query.views import VIEWS
from testbed.repository import ROOT
from tests.analysis.asked_run import make_run

RELEASED = ROOT / "testbed" / "recorded" / "columns_of_0_1_0.json"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("promised") / "run")
    with QuerySession(locate_run(str(folder)), lambda text: None) as opened:
        yield opened


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_columns_that_are_promised(view, session):
    """A new column gets a line in `rollstream/look/figures/columns.py`, with the coming release."""
    promised = {name: column.type for name, column in COLUMNS[view].items()}
    columns = session.columns(view)
    assert columns == promised
    assert list(columns) == list(promised)


def test_nothing_that_release_0_1_0_had_vanishes_or_changes_its_type():
    released = json.loads(RELEASED.read_text())
    assert released.keys() <= COLUMNS.keys()
    for view, columns in released.items():
        promised = COLUMNS[view]
        assert {name: promised[name].type for name in columns} == columns, view
        assert {name for name, column in promised.items() if column.since == "0.1.0"} == {*columns}


def test_each_column_names_a_release_of_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = set(re.findall(r"^## (\d+\.\d+\.\d+)", text, re.MULTILINE))
    assert {column.since for columns in COLUMNS.values() for column in columns.values()} <= releases
    assert {column.since for column in COLUMNS["fates"].values()} == {"0.2.0"}
