"""Monitoring of a run: its live state, the metrics of a moment, the terminal view, the warnings.

`feed` reads log and metrics files into a bounded `state` (`groups`, `samples`). `snapshot` computes
the metrics of a moment from it, with `progress`, `rollouts`, `scheduling` and `moves`. The warnings
(`warnings_flow`, `warnings_learning`, `warnings_log`) are functions of a snapshot. `observer` joins
these steps. `rows`, `table`, `frame` and `format` lay a snapshot out as text; `view` redraws it.
Nothing here writes to the run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.monitor.feed import RunFeed
    from rollstream.monitor.frame import render_frame
    from rollstream.monitor.observer import RunObserver, warnings_at_end, warnings_of
    from rollstream.monitor.snapshot import (
        RunSettings,
        RunSnapshot,
        RunWarning,
        run_settings_of,
        take_snapshot,
    )
    from rollstream.monitor.state import RunState
    from rollstream.monitor.view import LiveView

__all__ = [
    "LiveView",
    "RunFeed",
    "RunObserver",
    "RunSettings",
    "RunSnapshot",
    "RunState",
    "RunWarning",
    "render_frame",
    "run_settings_of",
    "take_snapshot",
    "warnings_at_end",
    "warnings_of",
]

_MODULES = {
    "LiveView": "view",
    "RunFeed": "feed",
    "RunObserver": "observer",
    "RunSettings": "snapshot",
    "RunSnapshot": "snapshot",
    "RunState": "state",
    "RunWarning": "snapshot",
    "render_frame": "frame",
    "run_settings_of": "snapshot",
    "take_snapshot": "snapshot",
    "warnings_at_end": "observer",
    "warnings_of": "observer",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
