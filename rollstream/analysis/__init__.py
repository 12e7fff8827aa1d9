"""Read-only analysis of a run: SQL over log and archive, `tail`, and the details of a trajectory.

`locate` finds and opens a run's data. `session` runs SQL over the `views`; `base_views` join the
rows of `archive_files` and all others, which a `LogView` reads, by their `coverage`. `trajectory`
gathers everything about one trajectory, `render` prints it. `tail` reads a topic, `fields` parses
conditions, `describe` and `output` format records and results, `text` decodes tokens. `run` is
`rollstream.open_run` for notebooks.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.analysis.locate import RunLocation as RunLocation, locate_run as locate_run
    from rollstream.analysis.run import Run as Run
    from rollstream.analysis.session import QueryResult as QueryResult, QuerySession as QuerySession
    from rollstream.analysis.trajectory import (
        TrajectoryDetails as TrajectoryDetails,
        trajectory_details as trajectory_details,
    )
    from rollstream.analysis.views import VIEWS as VIEWS

__getattr__ = lazy_exports(
    __name__,
    {
        "locate": (
            "RunLocation",
            "locate_run",
        ),
        "run": ("Run",),
        "session": (
            "QueryResult",
            "QuerySession",
        ),
        "trajectory": (
            "TrajectoryDetails",
            "trajectory_details",
        ),
        "views": ("VIEWS",),
    },
)
