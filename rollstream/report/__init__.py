"""Reports of runs: one HTML page per run, a page for several runs, a comparison, a summary.

`reading` folds log and metrics files into a `history`. `summary`, `comparison`, `drafts` and
`dropped` derive metrics from it. `charts` and `timeline` draw SVG, `page` holds the HTML parts,
`write` the sections of a report, `overlay` the page of several runs, `simulated` that of a
simulation.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.report.comparison import (
        RunComparison as RunComparison,
        compare_runs as compare_runs,
    )
    from rollstream.report.history import RunHistory as RunHistory
    from rollstream.report.overlay import write_overlay as write_overlay
    from rollstream.report.reading import (
        open_history as open_history,
        read_history as read_history,
        run_folder as run_folder,
    )
    from rollstream.report.summary import RunSummary as RunSummary, summarise as summarise
    from rollstream.report.write import write_report as write_report

__getattr__ = lazy_exports(
    __name__,
    {
        "comparison": (
            "RunComparison",
            "compare_runs",
        ),
        "history": ("RunHistory",),
        "overlay": ("write_overlay",),
        "reading": (
            "open_history",
            "read_history",
            "run_folder",
        ),
        "summary": (
            "RunSummary",
            "summarise",
        ),
        "write": ("write_report",),
    },
)
