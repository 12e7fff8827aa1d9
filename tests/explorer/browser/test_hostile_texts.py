"""Texts of a run that try to become markup or script, to reorder what is beside them, or to fill
the page: they are shown as text and do nothing.
"""

import pytest
from playwright.sync_api import expect

from testbed.explorer_server import serving
from tests.explorer.browser.hostile_run import HOSTILE, make_hostile_run

pytestmark = pytest.mark.slow
UNSEEN = {*range(0x20), 0x7F, 0x9B, *range(0x200B, 0x2010), *range(0x2028, 0x202F), 0x2060,
          *range(0x2066, 0x206A), 0xFEFF, *range(0xE0000, 0xE0080)} - {10}  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    work = tmp_path_factory.mktemp("hostile")
    folder = make_hostile_run(work / "<img src=x onerror=alert(1)>")
    with serving([str(folder)]) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_hostile_texts_are_shown_in_every_view_and_none_runs(watch, hostile, tmp_path) -> None:
    assert len(HOSTILE) == 40
    watched = watch(hostile)
    for view in ("overview", "steps/1", "groups", "groups/0", "groups/1", "questions", "search",
                 "search?q=script&in=all", "lanes", "settings", "audit", "records/trajectories/0/0",
                 "records/ledger/0/2", "maps/lag", "weights"):  # fmt: skip
        page = watched.open(f"#/r/0/{view}")
        assert page.evaluate("window.hit") is None, view
    watched.check()


def test_each_answer_is_there_as_text_with_its_marks_visible(watch, hostile) -> None:
    page = watch(hostile).open("#/r/0/groups/0")
    shown = page.locator("article.sample .run-text.block").all_text_contents()
    for text, found in zip(HOSTILE, shown, strict=False):
        plain = "".join(c for c in text if ord(c) not in UNSEEN)
        kept = "".join(c for c in found if not 0x2400 <= ord(c) <= 0x2421)
        first = plain.split("\n")[0].split(" ")[0][:12]
        assert first in kept, (text, found[:80])
        assert not any(ord(c) in UNSEEN for c in found), ascii(found[:80])


def test_tokens_of_hostile_text_are_shown_one_by_one(watch, hostile) -> None:
    watched = watch(hostile)
    for index in (0, 2, 30, 34, 36):
        page = watched.open(f"#/r/0/trajectories/0.{index}")
        page.locator("[data-n='1']").hover()
        expect(page.get_by_role("complementary", name="Token")).to_contain_text("log-probability")
        assert page.evaluate("window.hit") is None


def test_a_line_of_ten_megabytes_is_bounded_until_more_is_asked(watch, hostile) -> None:
    page = watch(hostile).open("#/r/0/groups/0")
    sample = page.get_by_role("article", name="Trajectory 0.40")
    assert len(sample.text_content() or "") < 6_000
    sample.get_by_role("button", name="show more").click()
    expect(sample.get_by_text("cut; the trajectory has the rest")).to_be_visible()
    page = watch(hostile).open("#/r/0/trajectories/0.40")
    assert len(page.locator("main").text_content() or "") < 2_000_000
