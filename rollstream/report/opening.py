"""Opens a finished, stopped or running run for reports, read-only."""

from collections.abc import Sequence
from pathlib import Path

from rollstream.config.config import load_for_viewing
from rollstream.config.run_folder import RunFolder, open_run_log_for_writing, store_url
from rollstream.report.history import RunHistory
from rollstream.report.reading import read_history
from rollstream.storage.stores.connect import open_store
from rollstream.errors import ConfigurationError
from rollstream.streams.topics import catalogue


def run_folder(path: str | Path) -> RunFolder:
    """Returns the run at `path`, its folder or its `config.json`; raises without a run there."""
    given = Path(path).absolute()
    folder = RunFolder(given.parent if given.name == "config.json" else given)
    if not folder.configuration.exists():
        raise ConfigurationError(f"{folder.path} holds no run (no config.json there)")
    return folder


def open_history(folder: RunFolder) -> RunHistory:
    """Returns the run's history, read from its log and metrics files up to now."""
    configuration = load_for_viewing(folder.configuration)
    bus = open_run_log_for_writing(configuration, folder.path)
    try:
        bus.create(catalogue())  # a prepared run that never started has no topics yet
        store = open_store(store_url(configuration, folder.path), configuration.sync)
        return read_history(bus, store, folder)
    finally:
        bus.close()


def distinct_names(folders: Sequence[RunFolder]) -> list[str]:
    """Returns distinct names of the runs: their folders' names, or full paths if two are equal."""
    names = [folder.path.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
