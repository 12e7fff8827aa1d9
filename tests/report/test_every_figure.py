"""Nothing that the report ever showed is lost: `figures.json` lists every card, note, tile, cell
and mark of a report with all its parts, and of each curve its first, middle and last value.
"""

import json
from pathlib import Path

import pytest

from rollstream.look.explorer.serving.report_file import write_report
from rollstream.look.query.locate import locate_run
from rollstream.look.report.summary import open_history, summarise
from rollstream.run.config.run_folder import RunFolder
from testbed.two_pages.shown import numbers_of
from tests.report.full_history import fill
from tests.report.shown_figures import figures, read_page

LISTED = json.loads((Path(__file__).parent / "figures.json").read_text())


@pytest.fixture(scope="module")
def shown(run_folder: RunFolder, tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    """What the page of the full history shows: card → name → values."""
    history = fill(open_history(run_folder))
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(history, summarise(history), path, locate_run(str(run_folder.path)))
    cards: dict[str, dict[str, list[str]]] = {}
    for card, name, value in figures(read_page(path.read_text())):
        cards.setdefault(card, {}).setdefault(name, []).append(value)
    return cards


@pytest.mark.parametrize("card", LISTED)
def test_every_listed_figure_is_shown_with_its_value(shown, card):
    missing = [
        (name, value)
        for name, value in LISTED[card]
        if not any(same(value, other) for other in shown.get(card, {}).get(name, ()))
    ]
    assert missing == []


def same(listed: str, shown: str) -> bool:
    """Equal texts; of numbers, the shown one may have more digits; a note may go on."""
    if listed == shown or shown.startswith(f"{listed};"):
        return True
    pairs = [numbers_of(text) for text in (listed, shown)]
    if [len(pair) for pair in pairs] != [1, 1]:
        return False
    ((number, rounding),), ((other, _),) = pairs
    return abs(number - other) <= 1.02 * rounding + 1e-4 * abs(number)
