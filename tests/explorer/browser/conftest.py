"""A browser for the tests of one file, and a server of the explorer as a user starts it."""

from collections.abc import Generator

import pytest

from testbed.browser import NoBrowser, WatchedPage, running_browser
from testbed.repository import ROOT
from tests.explorer.browser.served import served

ARCHIVE = ROOT / "examples" / "archive"


@pytest.fixture(scope="module")
def browser():
    """Ends with the file: while it runs, no other test of the process could use asyncio."""
    try:
        with running_browser() as found:
            yield found
    except NoBrowser as error:
        pytest.fail(str(error))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The origin of a server that shows the example archive."""
    with served([ARCHIVE], tmp_path_factory.mktemp("served")) as origin:
        yield origin


@pytest.fixture
def watch(browser):
    """Opens pages of an origin; the test fails if one of them did what a page may not do."""
    opened: list[WatchedPage] = []

    def open_page(origin: str, width: int = 1280, dark: bool = False) -> WatchedPage:
        opened.append(WatchedPage(browser, origin, width, dark))
        return opened[-1]

    yield open_page
    for one in opened:
        one.close()
        one.check()
