"""Every view of the page opened and photographed, wide and light, narrow and dark: it shows what it
is about, fits the screen, and axe-core finds nothing serious. Keys, and a run that lives.
"""

import os
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from rollstream.streams.topics import catalogue
from testbed.explorer_server import serving
from testbed.repository import EXAMPLES
from tests.analysis.asked_run import (
    make_run,
    open_log,
    publish_first,
    publish_rest,
)

pytestmark = pytest.mark.slow
PICTURES = os.environ.get("EXPLORER_PICTURES", "")  # a folder that keeps the pictures
VIEWS = {
    "overview": ("r/0/overview?with=1", "Held-out accuracy"),
    "steps": ("r/0/steps", "state"),
    "step": ("r/0/steps/12", "all rewards are 1"),
    "groups": ("r/0/groups?ended=filtered", "all rewards are 0"),
    "group": ("r/0/groups/136", "074%22"),
    "trajectory": ("r/0/trajectories/49.1?by=version", "not trained"),
    "confidence": ("r/0/trajectories/136.3?by=logprob", "below 1"),
    "lanes": ("r/0/lanes", "trajectories in this window"),
    "decodes": ("r/0/lanes?from=10&to=10.6", "Trajectories in this window"),
    "weights": ("r/0/weights", "Who holds what"),
    "map-lag": ("r/0/maps/lag?lag_min=2&lag_max=3", "Selected trajectories"),
    "map-length": ("r/0/maps/length", "difficulty"),
    "questions": ("r/0/questions", "Which rollout was slow?"),
    "search": ("r/0/search?q=540", "=540"),
    "audit": ("r/0/audit", "No violation"),
    "record": ("r/0/records/ledger/0/5", "step_done/1"),
    "settings": ("r/0/settings", "trainer.lr"),
    "sql": ("r/0/sql?q=SELECT+step+FROM+steps", "Answer"),
    "compare": ("compare?runs=0,1", "Settings that differ"),
    "compare-step": ("compare/steps/2?runs=0,1", "Advantages"),
    "living": ("r/1/trajectories/0.0", "What happened"),
}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The example archive beside a small run whose log has assignments and partials."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "asked")
    with serving([str(EXAMPLES / "archive"), str(folder)], with_sql=True) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_every_view_shows_itself_fits_and_is_accessible(
    watch, two_runs, tmp_path, width, dark
) -> None:
    watched = watch(two_runs, width, dark)
    folder = Path(PICTURES or tmp_path) / ("dark" if dark else "light")
    for name, (fragment, words) in VIEWS.items():
        page = watched.open(f"#/{fragment}")
        expect(page.locator("main")).to_contain_text(words)
        watched.settled()
        watched.picture(folder / f"{name}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert serious(page) == [], name
    watched.check()
    assert len(list(folder.glob("*.png"))) == len(VIEWS)


def serious(page) -> list[str]:
    """What axe-core finds that keeps a person from using the page."""
    found = Axe().run(page, options={"preload": False}).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['target']} {one['nodes'][0]['html'][:120]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_keys_walk_rows_open_views_and_lead_back(watch, archive) -> None:
    page = watch(archive).open("#/r/0/steps")
    for key in "jj":
        page.keyboard.press(key)
    expect(page.locator(":focus")).to_have_text("19")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Step 19")).to_be_visible()
    page.keyboard.press("[")
    expect(page.get_by_role("heading", name="Step 18")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Steps", exact=True)).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("l")
    expect(page.get_by_role("heading", name="Swimlanes")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("heading", name="Search")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_a_brush_over_a_map_selects_and_its_address_can_be_sent(watch, archive) -> None:
    watched = watch(archive)
    page = watched.open("#/r/0/maps/lag")
    box = page.locator("canvas").bounding_box()
    assert box
    page.mouse.move(box["x"] + 80, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 290, steps=4)
    page.mouse.up()
    table = page.get_by_role("region", name="Selected trajectories").last
    expect(table.get_by_role("link").first).to_be_visible()
    chosen = watched.settled().get_by_role("status").last.text_content()
    sent = watch(archive)
    sent.page.goto(page.url)
    sent.settled()
    expect(sent.page.get_by_role("status").last).to_contain_text((chosen or "").split(",")[0])


def test_zooming_into_the_swimlanes_keeps_the_window_in_the_address(watch, archive) -> None:
    page = watch(archive).open("#/r/0/lanes")
    for _ in range(4):
        page.get_by_role("button", name="Zoom in").click()
    page.wait_for_url("**from=*")
    page.locator("canvas").press("ArrowRight")
    expect(page.get_by_role("region", name="Trajectories in this window").first).to_be_visible()
    page.get_by_role("button", name="Whole run").click()
    expect(page.get_by_role("group", name="Window")).to_contain_text("0:00 to 0:29")


def test_a_living_run_is_followed_without_losing_the_place(watch, tmp_path) -> None:
    folder = make_run(tmp_path / "asked")
    shutil.rmtree(folder / "bus")
    bus = open_log(folder)
    bus.create(catalogue(2))
    publish_first(bus)
    with serving([str(folder)]) as server:
        page = watch(f"http://127.0.0.1:{server.port}", 1000).open("#/r/0/steps")
        steps = page.get_by_role("region", name="Steps").get_by_role("link")
        expect(steps).to_have_text(["1"])
        steps.first.focus()
        publish_rest(bus)
        expect(steps).to_have_text(["2", "1"])
        expect(page.locator(":focus")).to_have_text("1")
    bus.close()


def test_what_is_not_there_is_stated_and_other_views_stay_reachable(watch, archive) -> None:
    watched = watch(archive)
    page = watched.open("#/r/0/overview")
    for fragment in ("r/0/groups/99999", "r/7/overview", "r/0/maps/nothing"):
        page.goto(f"{archive}/#/{fragment}")
        expect(page.get_by_role("alert").first).to_be_visible()
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("remainder")
    expected = [fault for fault in watched.faults if "404" in fault]
    assert watched.faults == expected
    watched.faults.clear()
