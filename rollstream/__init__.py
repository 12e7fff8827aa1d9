"""The face of the project. `rollstream.open_run(url)` opens a run for notebooks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.analysis.run import Run

__all__ = ["open_run"]


def open_run(url: str | None = None, name: str | None = None, skip_corrupt: bool = False) -> "Run":
    """A run as Arrow tables and records: by its folder, its config.json, or its archive (a folder
    or a store's URL); None is the newest in `runs/`. `name` is the run wanted of an archive that
    holds several.
    """
    from rollstream.analysis.run import Run  # DuckDB and pyarrow, which no other command needs

    return Run(url, name, skip_corrupt)
