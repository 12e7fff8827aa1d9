"""Reads the numbers that the explorer's pages show in a browser (`page_numbers`): each element that
shows one names its figure. A tile or a cell with a number and without a name has none.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from testbed.two_pages.shown import ShownNumber, numbers_of, shown_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VIEWS = ("overview", "steps", "groups", "questions")
READ = """() => [...document.querySelectorAll("main [data-figure]")].map((one) => ({
  figure: one.dataset.figure, of: one.dataset.of ?? "", text: one.innerText ?? one.textContent}))"""
CELLS = """() => [...document.querySelectorAll("main table")].flatMap((table) => {
  const heads = [...table.querySelectorAll("thead th")].map((one) => one.innerText);
  const named = table.closest(".fit") ? "section[aria-label]" : "[aria-label]";
  const label = table.closest(named)?.getAttribute("aria-label") ?? "";
  return [...table.querySelectorAll("tbody tr")].flatMap((row) => [...row.cells].map((cell, n) =>
    ({ cell, head: heads[n] })).filter(({ cell }) => cell.classList.contains("n")
      && !cell.dataset.figure && !cell.querySelector("[data-figure]")).map(({ cell, head }) =>
    ({ label, head, text: cell.innerText }))); })"""
# Columns of numbers that no other place shows, or that name something.
OWN_COLUMNS = {
    "Steps": {"step"},
    "Groups": {"step", "wave", "admitted (UTC)"},
    "Groups of the step": set[str](),
    "Every admitted group has one ending": {"share", "times"},
    "Drafts": {"tokens", "drafted"},
    "Log-probability of right and wrong answers": {"answers", "mean", "least sure token"},
    "Prompts that are never solved": {"answers", "tokens", "cut"},
}
OWN_TABLES = ("Members of micro-batch", "Dropped groups", "Members left out", "Scores by version")
TILES = """() => [...document.querySelectorAll("main .tile")]
  .filter((one) => !one.querySelector("[data-figure]")).map((one) => one.innerText)"""


def page_numbers(browser: "Browser", origin: str, last_step: int) -> Iterator[ShownNumber]:
    """Yields the numbers of the views that show figures, and of the last step."""
    from testbed.browser import WatchedPage

    watched = WatchedPage(browser, origin)
    try:
        for view in (*VIEWS, f"steps/{last_step}"):
            page = watched.open(f"#/r/0/{view}")
            place = f"explorer page {view.partition('/')[0]}"
            for element in cast("list[dict[str, Any]]", page.evaluate(READ)):
                figures, of, text = element["figure"].split(), element["of"], element["text"]
                yield from shown_in(place, element["figure"], figures, [of] * len(figures), text)
            for cell in cast("list[dict[str, str]]", page.evaluate(CELLS)):
                is_own = cell["head"] in OWN_COLUMNS.get(cell["label"], ())
                if not is_own and not cell["label"].startswith(OWN_TABLES):
                    where = f"{cell['label']}: {cell['head']}"
                    yield from (
                        ShownNumber(place, where, "", "", number)
                        for number, _ in numbers_of(cell["text"])
                    )
            for text in cast("list[str]", page.evaluate(TILES)):
                if numbers := numbers_of(text):
                    yield ShownNumber(place, json.dumps(text), "", "", numbers[0][0])
        watched.check()
    finally:
        watched.close()
