"""A browser for the tests of one file, and pages that fail the test for what a page may not do."""

from collections.abc import Generator

import pytest
from playwright.sync_api import expect

from testbed.browser import WAIT_MS, NoBrowser, WatchedPage, running_browser
from testbed.explorer_server import serving
from testbed.repository import EXAMPLES

expect.set_options(timeout=WAIT_MS)  # a test continues at once; this only ends a hang


@pytest.fixture(scope="module")
def browser():
    """Ends with the file: while it runs, no other test of the process could use asyncio."""
    try:
        with running_browser() as found:
            yield found
    except NoBrowser as error:
        pytest.fail(str(error))


@pytest.fixture(scope="module")
def archive() -> Generator[str]:
    """The origin of a server that shows the example archive."""
    with serving([str(EXAMPLES / "archive")], with_sql=True) as server:
        yield f"http://127.0.0.1:{server.port}"


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
