"""The page of an export, from a host of files that knows nothing of runs: the same views, ranges of
Parquet read in the browser, no request elsewhere.
"""

import shutil

import pytest
from playwright.sync_api import expect

from rollstream.look.explorer.serving.export import export
from rollstream.look.query.locate import locate_run
from tests.analysis.asked_run import archive as archive_run, make_run
from tests.explorer.browser.file_host import file_host

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The small run whose every count is known, archived, exported and served as files."""
    work = tmp_path_factory.mktemp("exported")
    folder = make_run(work / "asked")
    archive_run(folder)
    shutil.rmtree(folder / "bus")
    export([locate_run(str(folder))], work / "demo", lambda _: None)
    with file_host(work / "demo") as origin:
        yield origin


def test_views_of_an_export_are_read_by_ranges(watch, exported) -> None:
    watched = watch(exported)
    ranges: list[str] = []
    watched.page.on("request", lambda r: ranges.append(r.headers.get("range", "")))
    for view, words in (
        ("overview", "Every admitted group has one ending"),
        ("steps", "state"),
        ("steps/2", "all rewards are 1"),
        ("groups", "filtered"),
        ("groups/0", "118%83"),
        ("trajectories/1.0?by=logprob", "below 1"),
        ("lanes", "trajectories in this window"),
        ("questions", "Which rollout was slow?"),
        ("maps/length", "difficulty"),
        ("weights", "Who holds what"),
        ("settings", "dispatch.max_lag"),
    ):
        expect(watched.open(f"#/r/0/{view}").locator("main")).to_contain_text(words)
    assert any(one.startswith("bytes=") for one in ranges)


def test_an_export_is_searched_in_the_browser(watch, exported) -> None:
    page = watch(exported).open("#/r/0/search")
    expect(page.get_by_role("status").last).to_contain_text("7 of 7")
    page.get_by_role("searchbox").fill("=531<eos>")
    expect(page.locator(".found mark")).to_have_count(6)
    expect(page.locator(".found mark").first).to_have_text("=531<eos>")
    page.get_by_role("link", name="dead", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("1 of 7")


def test_a_brush_over_an_exported_map_selects(watch, exported) -> None:
    page = watch(exported).open("#/r/0/maps/lag?reward_min=0.9&reward_max=1")
    expect(page.get_by_role("status").last).to_contain_text("3 of 7")
