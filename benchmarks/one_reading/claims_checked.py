"""`claims_checked`: figures of README and docs that the last runs do not hold, in prose and in the
tables that are made from them; the note names the first.
"""

from collections.abc import Iterator

from benchmarks.case import Case, alone
from benchmarks.claims import read_pages, unheld_figures
from testbed.reference_pages import DOCS, PAGES, page_text


def cases(quick: bool) -> Iterator[Case]:
    unheld = [str(figure) for figure in unheld_figures()]
    unheld += [f"docs/{name}: a generated table is stale" for name in PAGES if _is_stale(name)]
    note = "; ".join([f"{len(read_pages())} pages", *unheld[:3]])
    yield alone("claims_checked", len(unheld), "figures", at_most=0.0, note=note)


def _is_stale(name: str) -> bool:
    return (DOCS / name).read_text(encoding="utf-8") != page_text(name)
