"""Read-only analysis of a run: SQL over log and archive, `tail`, and the details of a trajectory.

`locate` finds a run's data. `session` runs SQL over the `views`; `base_views` join the rows of
`archive_files` and of the log (`log_rows`) by their `coverage`. `trajectory` gathers everything
about one trajectory, `render` prints it. `tail` reads a topic, `fields` parses conditions,
`describe` and `output` format records and results, `text` decodes tokens. `run` is
`rollstream.open_run` for notebooks.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.analysis.locate import RunLocation, locate_run
    from rollstream.analysis.run import Run
    from rollstream.analysis.session import QueryResult, QuerySession
    from rollstream.analysis.tail import TailRecord, TopicTail
    from rollstream.analysis.trajectory import TrajectoryDetails, trajectory_details
    from rollstream.analysis.views import VIEWS

__all__ = [
    "VIEWS",
    "QueryResult",
    "QuerySession",
    "Run",
    "RunLocation",
    "TailRecord",
    "TopicTail",
    "TrajectoryDetails",
    "locate_run",
    "trajectory_details",
]

_MODULES = {
    "QueryResult": "session",
    "QuerySession": "session",
    "Run": "run",
    "RunLocation": "locate",
    "TailRecord": "tail",
    "TopicTail": "tail",
    "TrajectoryDetails": "trajectory",
    "VIEWS": "views",
    "locate_run": "locate",
    "trajectory_details": "trajectory",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
