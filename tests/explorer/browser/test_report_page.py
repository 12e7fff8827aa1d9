"""The report in a browser, opened from a disk: its sheet without a script, the explorer around it
with one, on paper, and texts of a run that try to become markup.
"""

import os
from pathlib import Path

import pytest
from playwright.sync_api import expect

from rollstream.run.cli.main import main
from testbed.explorer_server import serving
from testbed.waiting import wait_for
from tests.explorer.browser.hostile_run import make_hostile_run
from tests.support.synthetic_run import publish_run

pytestmark = pytest.mark.slow
DISK = "file://"
PICTURES = os.environ.get("EXPLORER_PICTURES", "")  # a folder that keeps the pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = publish_run(tmp_path_factory.mktemp("reported") / "run").path
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_it_opens_from_a_disk_with_the_views_that_it_holds(watch, run, tmp_path, width, dark):
    watched = watch(DISK, width, dark)
    page = watched.open(str(run / "report.html")[1:])
    expect(page.get_by_role("navigation", name="Views")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("synthetic")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    watched.picture(Path(PICTURES or tmp_path) / f"report-{width}.png")
    for view, words in (
        ("steps", "reward"), ("steps/60", "Takes"), ("groups", "trained"),
        ("settings", "trainer.lr"), ("questions", "Which rollout was slow?"),
        ("maps/length", "difficulty"), ("weights", "Who holds what"),
        ("groups/7", "rollstream explore"),
    ):  # fmt: skip
        page.goto(f"file://{run}/report.html#/r/0/{view}")
        expect(page.locator("main")).to_contain_text(words)
    for name in ("Search", "Audit", "Swimlanes"):
        expect(page.get_by_role("link", name=name)).to_have_count(0)
    watched.check()


def test_the_cursor_shows_the_values_of_a_step_and_a_click_opens_it(watch, run):
    watched = watch(DISK)
    page = watched.open(str(run / "report.html")[1:])
    reward = page.get_by_role("region", name="Reward", exact=True).get_by_role("img")
    box = reward.bounding_box()
    assert box
    # A chart is 560 units wide; its steps 0 to 60 lie from 44 to 508.
    x = box["x"] + box["width"] * (44 + 464 * 30 / 60) / 560
    page.mouse.move(x, box["y"] + box["height"] / 2)
    expect(page.locator(".chart-tip").first).to_contain_text("step 30")
    page.mouse.click(x, box["y"] + box["height"] / 2)
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 30")
    watched.check()


def test_without_a_script_it_shows_the_same_sheet(browser, watch, run):
    shown = watch(DISK).open(str(run / "report.html")[1:]).locator("main").inner_text()
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"file://{run}/report.html")
        assert page.locator("main").inner_text() == shown
        assert page.locator("nav").count() == 0
        page.emulate_media(media="print")
        assert page.locator("svg").count() >= 12


def test_a_living_explorer_shows_the_sheet_and_a_drag_narrows_it(watch, run):
    with serving([str(run)]) as server:
        # Warnings that come later would move the curves.
        wait_for(lambda: server.explorer.runs[0].snapshot is not None)
        watched = watch(f"http://127.0.0.1:{server.port}")
        page = watched.open("#/r/0/overview")
        reward = page.get_by_role("region", name="Reward", exact=True).get_by_role("img")
        box = reward.bounding_box()
        assert box
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 80, steps=4)
        page.mouse.up()
        expect(page.locator("main")).to_contain_text("alone")
        assert "steps=" in page.url
        page.get_by_role("button", name="all steps").click()
        expect(page.locator("main")).not_to_contain_text("alone")
        watched.check()


def test_hostile_texts_of_a_run_do_nothing_in_its_report(watch, tmp_path):
    folder = make_hostile_run(tmp_path / "<img src=x onerror=alert(1)>")
    output = tmp_path / "page.html"
    assert main(["report", str(folder), "--output", str(output)]) == 0
    watched = watch(DISK)
    page = watched.open(str(output)[1:])
    for view in ("overview", "steps", "steps/1", "groups", "settings", "questions"):
        page.goto(f"file://{output}#/r/0/{view}")
        watched.settled()
        assert page.evaluate("window.hit") is None, view
    watched.check()
