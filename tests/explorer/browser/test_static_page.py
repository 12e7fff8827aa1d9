"""The page of an export, from a host of files that knows nothing of runs: the same views, ranges of
Parquet read in the browser, no request elsewhere.
"""

import pytest
from playwright.sync_api import expect

from rollstream.analysis.locate import locate_run
from rollstream.explorer.export import export
from testbed.repository import EXAMPLES
from tests.explorer.browser.file_host import file_host

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "demo"
    export([locate_run(str(EXAMPLES / "archive"))], folder, lambda _: None)
    with file_host(folder) as origin:
        yield origin


def test_views_of_an_export_are_read_by_ranges(watch, exported) -> None:
    watched = watch(exported)
    ranges: list[str] = []
    watched.page.on("request", lambda r: ranges.append(r.headers.get("range", "")))
    for view, words in (
        ("overview", "Held-out accuracy"),
        ("steps/12", "all rewards are 1"),
        ("groups/136", "074%22"),
        ("trajectories/136.3?by=logprob", "below 1"),
        ("lanes", "1\u202f312"),
        ("lanes?from=10&to=11", "Trajectories in this window"),
        ("questions", "Which rollout was slow?"),
        ("maps/length", "difficulty"),
        ("audit", "No violation"),
        ("records/ledger/0/36", "take/1"),
    ):
        expect(watched.open(f"#/r/0/{view}").locator("main")).to_contain_text(words)
    assert any(one.startswith("bytes=") for one in ranges)


def test_an_export_is_searched_in_the_browser(watch, exported) -> None:
    page = watch(exported).open("#/r/0/search")
    expect(page.get_by_role("status").last).to_contain_text("1\u202f312 of 1\u202f312")
    page.get_by_role("searchbox").fill("=540<eos>")
    expect(page.locator(".found mark").first).to_have_text("=540<eos>")
    page.get_by_role("link", name="filtered groups").click()
    expect(page.get_by_role("status").last).to_contain_text("352 of 1\u202f312")


def test_a_brush_over_an_exported_map_selects(watch, exported) -> None:
    page = watch(exported).open("#/r/0/maps/lag?lag_min=2&lag_max=3")
    expect(page.get_by_role("status").last).to_contain_text("142 of 1\u202f312")
