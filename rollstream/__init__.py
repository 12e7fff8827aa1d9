"""The face of the project. `rollstream.open_run(url)` opens a run for notebooks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.analysis.run import Run

    __version__: str

__all__ = ["__version__", "open_run"]


def __getattr__(name: str) -> str:
    """`__version__` without numpy, which `--help` need not wait for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streams.release import RELEASE

    return RELEASE


def open_run(url: str | None = None, name: str | None = None, skip_corrupt: bool = False) -> "Run":
    """A run as Arrow tables and records: by its folder, its config.json, or its archive (a folder
    or a store's URL); None is the newest in `runs/`. `name` is the run wanted of an archive that
    holds several.
    """
    from rollstream.analysis.run import Run  # DuckDB and pyarrow, which no other command needs

    return Run(url, name, skip_corrupt)
