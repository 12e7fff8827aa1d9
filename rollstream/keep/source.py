"""Opens a run, or an archive, from which another run, a replay or a copy is made."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import RunLocation, locate_run
from rollstream.look.query.looking import open_run_view
from rollstream.run.config.run_model import model_is_read
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.base import ObjectStore


@dataclass(frozen=True, slots=True)
class RunSource:
    """An opened run. `log` reads log and archive as one; `store` is None if it does not exist."""

    location: RunLocation
    store: ObjectStore | None
    log: LogView


@contextmanager
def open_run_source(
    argument: str, name: str | None = None, is_trusted: bool = False
) -> Generator[RunSource]:
    """Open the input of a command, as `locate_run` finds it; `name` selects the run in an archive
    that holds several. If the log has no ledger, the archive alone is read. While the block runs,
    its model's files are kept in a private folder.
    """
    location = locate_run(argument, is_trusted)
    location = location if name is None else replace(location, run=name)
    read = model_is_read(location) if location.configuration else nullcontext()
    with open_run_view(location) as view, read:
        log = view if view.has("ledger") else LogView(None, view.store, view.run)
        yield RunSource(location, view.store, log)


def check_outside_run(path: Path, run: Path) -> None:
    """Raise `ConfigurationError` if the output folder `path` is inside the folder `run`."""
    if path.absolute().is_relative_to(run):
        raise ConfigurationError(f"--out {path.absolute()} is inside the run's own folder")
