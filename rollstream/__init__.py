"""RL post-training of language models as a streaming dataflow. `rollstream.open_run(url)` opens a
run for notebooks; `api` has all names that user code imports.

`run/` begins and runs, `look/` shows, `keep/` copies, forks, replays and deletes runs, `plan/`
answers before one is begun. `errors`, `contained_folder`, `deadline`, `exports`, `foreign_json`,
`http_connections`, `http_guard`, `http_proxies`, `http_server`, `import_path`, `metric_values`,
`os_failures`, `printable`, `private_state`, `program_output`, `temporary_folder` and `whole_file`
are used by all, `revision` names the code.
"""

from os import fspath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from rollstream.look.query.trajectory import Run

    __version__: str

__all__ = ["__version__", "open_run"]


def __getattr__(name: str) -> str:
    """Resolves the version lazily, so that `--help` does not import numpy."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollstream.streams.release import RELEASE

    return RELEASE


def open_run(
    url: "str | PathLike[str] | None" = None, name: str | None = None, skip_corrupt: bool = False
) -> "Run":
    """A run as Arrow tables and records: by its folder, its name in `runs/`, its config.json, or
    its archive (a folder or a store's URL); None opens the newest in `runs/`. `name` selects the
    run in an archive that holds several.
    """
    from rollstream.look.query.trajectory import Run  # imports DuckDB and pyarrow

    return Run(None if url is None else fspath(url), name, skip_corrupt)
