"""Monitoring of a run: its live state, the metrics of a moment, the terminal view, the warnings.

`feed` reads log and metrics files into a bounded `state` (`groups`, `samples`). `snapshot` computes
the metrics of a moment from it, with `progress`, `rollouts`, `scheduling` and `moves`. The warnings
(`warnings_flow`, `warnings_learning`, `warnings_log`) are functions of a snapshot. `observer` joins
these steps. `rows`, `table`, `frame` and `format` lay a snapshot out as text; `view` redraws it.
Nothing here writes to the run.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.monitor.feed import RunFeed as RunFeed
    from rollstream.monitor.frame import render_frame as render_frame
    from rollstream.monitor.observer import (
        RunObserver as RunObserver,
        warnings_at_end as warnings_at_end,
        warnings_of as warnings_of,
    )
    from rollstream.monitor.snapshot import (
        RunSettings as RunSettings,
        RunSnapshot as RunSnapshot,
        RunWarning as RunWarning,
        run_settings_of as run_settings_of,
        take_snapshot as take_snapshot,
    )
    from rollstream.monitor.state import RunState as RunState
    from rollstream.monitor.view import LiveView as LiveView

__getattr__ = lazy_exports(
    __name__,
    {
        "feed": ("RunFeed",),
        "frame": ("render_frame",),
        "observer": (
            "RunObserver",
            "warnings_at_end",
            "warnings_of",
        ),
        "snapshot": (
            "RunSettings",
            "RunSnapshot",
            "RunWarning",
            "run_settings_of",
            "take_snapshot",
        ),
        "state": ("RunState",),
        "view": ("LiveView",),
    },
)
