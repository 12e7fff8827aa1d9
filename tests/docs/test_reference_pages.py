"""The generated parts of `docs/` are up to date."""

import pytest

from testbed.reference_pages import DOCS, FIGURES_SCRIPT, PAGES, figures_text, page_text


@pytest.mark.parametrize("name", PAGES)
def test_page_is_not_stale(name: str) -> None:
    """If this fails: `python -m testbed.reference_pages`, then commit the page."""
    assert (DOCS / name).read_text(encoding="utf-8") == page_text(name)


def test_the_explorers_figures_are_not_stale() -> None:
    assert FIGURES_SCRIPT.read_text(encoding="utf-8") == figures_text()
