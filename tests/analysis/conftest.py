"""The queried run in each state: not archived, half archived, fully archived, without its log."""

import shutil

import pytest

from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.streams.topics import catalogue
from tests.analysis.asked_run import (
    CONFIGURATION,
    archive,
    make_run,
    open_log,
    publish_first,
    publish_rest,
)

STATES = ("live", "half", "whole", "archive")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One folder per state; only read them."""
    root = tmp_path_factory.mktemp("asked")
    found = {state: root / state for state in STATES}
    make_run(found["live"])
    make_run(found["whole"])
    archive(found["whole"])
    shutil.copytree(found["whole"], found["archive"])
    shutil.rmtree(found["archive"] / "bus")
    shutil.copytree(found["live"], found["half"])
    shutil.rmtree(found["half"] / "bus")
    bus = open_log(found["half"])
    bus.create(catalogue(2))
    publish_first(bus)
    archive(found["half"])
    publish_rest(bus)
    bus.close()
    assert CONFIGURATION["run"] == "asked"
    return found


@pytest.fixture(params=STATES)
def folder(request, folders):
    """The run in each of its states."""
    return folders[request.param]


@pytest.fixture
def asked(folder):
    """Runs a query and returns its rows; `reported` collects the warnings for the user."""
    reported: list[str] = []
    with QuerySession(locate_run(str(folder)), reported.append) as session:

        def ask(sql: str) -> list[tuple]:
            answer = session.answer(sql)
            return [row for rows in answer.batches for row in rows]

        ask.reported = reported  # pyright: ignore[reportFunctionMemberAccess]
        ask.session = session  # pyright: ignore[reportFunctionMemberAccess]
        yield ask
