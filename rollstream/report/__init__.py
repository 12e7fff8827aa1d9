"""Reports of runs: one HTML page per run, a page for several runs, a comparison, a summary.

`reading` folds log and metrics files into a `history`. `summary`, `comparison`, `drafts` and
`dropped` derive metrics from it. `charts` and `timeline` draw SVG, `page` holds the HTML parts,
`write` the sections of a report, `overlay` the page of several runs, `simulated` that of a
simulation.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.report.comparison import RunComparison, compare_runs
    from rollstream.report.history import RunHistory
    from rollstream.report.overlay import write_overlay
    from rollstream.report.reading import open_history, read_history, run_folder
    from rollstream.report.summary import RunSummary, summarise
    from rollstream.report.write import write_report

__all__ = [
    "RunComparison",
    "RunHistory",
    "RunSummary",
    "compare_runs",
    "open_history",
    "read_history",
    "run_folder",
    "summarise",
    "write_overlay",
    "write_report",
]

_MODULES = {
    "RunComparison": "comparison",
    "RunHistory": "history",
    "RunSummary": "summary",
    "compare_runs": "comparison",
    "open_history": "reading",
    "read_history": "reading",
    "run_folder": "reading",
    "summarise": "summary",
    "write_overlay": "overlay",
    "write_report": "write",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
