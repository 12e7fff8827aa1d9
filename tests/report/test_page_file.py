"""The file of a page: one file that asks for nothing, with hostile texts as text."""

import base64
import gzip
import json
import re

import pytest

from rollstream.look.explorer.page_file import PAGE_BYTES, page_html
from rollstream.look.explorer.serving.report_file import write_report
from rollstream.look.monitor.snapshot import RunWarning
from rollstream.look.query.locate import locate_run
from rollstream.look.report.cards import card, table
from rollstream.look.report.elements import element, html_of
from rollstream.look.report.history import RunHistory
from rollstream.look.report.sheet import run_sheet
from rollstream.look.report.summary import open_history, summarise
from tests.report.shown_figures import read_page

HOSTILE = (
    "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--", "]]>", "&lt;",
    "\x1b[2J\x07", "\u202egnp.exe", "\u2066a\u2069", "a\u200bb", "\ud800", "\x00", "\ufeff",
)  # fmt: skip
UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800]"
)


def unpacked(html: str) -> dict[str, dict[str, object]]:
    match = re.search(r'id="packed">([^<]*)</script>', html)
    assert match
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_texts_are_shown_as_text_with_visible_marks(text):
    history = RunHistory(configuration={"run": text, "task.name": text}, forked_from=text)
    history.concerns = [RunWarning("lag", text, text)]
    html = page_html(text, lambda detail: sheet_of(history, text))
    page = read_page(html)
    (main,) = page.all("main")
    assert not main.all("script")
    assert not main.all("img")
    assert len(page.all("script")) == 2
    html.encode()
    assert not UNSEEN.search(html.replace("\n", ""))
    for part in filter(None, UNSEEN.split(text)):
        assert main.text().count(part) >= 6


def sheet_of(history: RunHistory, text: str):
    more = card(text, text, table([text, "n"], [(text, 1)], ["", "run.steps"]))
    title = element("svg", {"aria-label": text}, element("title", {}, text))
    return [*run_sheet(history, summarise(history)), more, title]


def test_a_mark_names_its_character():
    assert html_of(element("p", {}, "a\u202eb")) == (
        '<p>a<span class="mark" title="U+202E">U+202E</span>b</p>'
    )
    assert html_of(element("title", {}, "\x1b")) == "<title>␛</title>"


def test_the_page_asks_for_nothing_and_allows_only_its_own_script(run_folder, tmp_path):
    path = tmp_path / "report.html"
    history = open_history(run_folder)
    write_report(history, summarise(history), path, locate_run(str(run_folder.path)))
    html = path.read_text()
    assert len(html.encode()) < PAGE_BYTES
    outside = html[: html.index('<script type="text/plain"')]
    assert not re.search(r"""https?://|src=|url\(|@import|href="(?!data:)""", outside)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    answers = unpacked(html)["answers"]
    assert {"runs", "r/0/steps", "r/0/settings", "r/0/groups", "r/0/steps/60"} <= answers.keys()


def test_answers_that_do_not_fit_are_left_out():
    answers = [
        (f"r/0/steps/{n}", json.dumps(list(range(n, n + 30_000))).encode()) for n in range(20)
    ]
    html = page_html("run", lambda detail: [], answers)
    assert 250_000 < len(html.encode()) <= PAGE_BYTES
    chosen = unpacked(html)["answers"]
    assert [*chosen] == [key for key, _ in answers][: len(chosen)]
    assert 0 < len(chosen) < 20


def test_modules_of_the_page_import_no_circle_and_none_that_is_left_out():
    """A report joins them leaf by leaf; a view that is opened later may be left out."""
    modules = unpacked(page_html("run", lambda detail: []))["modules"]
    seen: list[str] = []

    def walk(name: str) -> None:
        assert name not in seen, [*seen, name]
        seen.append(name)
        text = modules[name]
        assert isinstance(text, str)
        for kind, target in re.findall(r'(from\s*|import\()"(\.[^"]+)"', text):
            parts = [*name.split("/")[:-1], *target.split("/")]
            path: list[str] = []
            for part in parts:
                if part == "..":
                    path.pop()
                elif part != ".":
                    path.append(part)
            assert "/".join(path) in modules or kind == "import("
            if "/".join(path) in modules:
                walk("/".join(path))
        seen.pop()

    walk("app.js")
