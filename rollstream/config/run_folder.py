"""Names the files of a run's folder and guarantees that a folder belongs to one configuration.

A run with another configuration cannot start in the folder, so no log mixes two runs: the error
shows the differences, unless the user accepts the change. Incidental settings
(`storage.settings.Scope`) may always change. Relative URLs of the log and the object store name
places inside the folder.
"""

import json
import os
import secrets
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rollstream.analysis.locate import url_inside
from rollstream.config.config import (
    CODE_REVISION,
    essential_settings,
    load,
    refuse_changes,
    setting_changes,
)
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.revision import code_revision
from rollstream.storage.claim_check import open_log
from rollstream.storage.hf_folder import find_hf_folder
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import check_conditional_writes, open_store
from rollstream.streams.bus import Bus
from rollstream.streams.connect import check_reachable
from rollstream.streams.topics import catalogue

FOLDER_ADVICE = (
    "use its own configuration, choose another folder with --run DIR, or change the run "
    "from its next step on with --accept-config"
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names the files of one run below `path`."""

    path: Path

    @property
    def configuration(self) -> Path:
        return self.path / "config.json"

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the starting policy; the warm-up writes it."""
        return self.path / "model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def folder_of_run(configuration: Configuration) -> RunFolder:
    """Returns the folder of this configuration's run, by default `runs/NAME`."""
    return RunFolder(Path(configuration.folder or f"runs/{configuration.run}").absolute())


def bus_url(configuration: Configuration, folder: Path) -> str:
    """Returns the URL of the log; a relative path is inside the run's folder."""
    return url_inside(configuration.bus, folder)


def store_url(configuration: Configuration, folder: Path) -> str:
    """Returns the URL of the object store; a relative path is inside the run's folder."""
    return url_inside(configuration.store, folder)


def store_for_writing(configuration: Configuration, folder: Path) -> ObjectStore:
    """Open the run's store. Raises `ConfigurationError` if the store ignores conditional writes."""
    store = open_store(store_url(configuration, folder), configuration.sync)
    check_conditional_writes(store, configuration.store, uuid.uuid4().hex)
    return store


def open_run_log_for_writing(configuration: Configuration, folder: Path) -> Bus:
    """Open the run's log; its reads replace claim checks by the large records from the store."""
    urls = bus_url(configuration, folder), store_url(configuration, folder)
    return open_log(*urls, configuration.sync)


def run_folder(path: str | Path) -> RunFolder:
    """Returns the folder of the run at `path`, which is that folder or its `config.json`. Raises
    `ConfigurationError` if there is no run.
    """
    given = Path(path).absolute()
    folder = RunFolder(given.parent if given.name == "config.json" else given)
    if not folder.configuration.exists():
        raise ConfigurationError(f"{folder.path} holds no run (no config.json there)")
    return folder


def model_folder(configuration: Configuration, folder: Path) -> Path:
    """Returns the Hugging Face folder of version 0: the configured one, else the warm-up's."""
    given = configuration.model.path
    return find_hf_folder(given) if given else RunFolder(folder).model


def reach(configuration: Configuration, folder: Path) -> None:
    """Check that log and store of the run are reachable, and create the log's topics."""
    check_reachable(configuration.bus)
    with closing(open_run_log_for_writing(configuration, folder)) as bus:
        bus.create(catalogue())
    store_for_writing(configuration, folder)


def write_configuration(
    folder: RunFolder,
    configuration: Configuration,
    accepted: bool = False,
    reach: Callable[[], None] = lambda: None,
) -> None:
    """Make the folder and write `config.json`. Raises `ConfigurationError` if an existing one
    differs in an essential setting and the change is not `accepted`.

    A folder without a `config.json` gets one only after `reach` returned. Otherwise a mistyped URL
    would claim the folder, and the corrected command would be refused as another configuration.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the run's folder {folder.path} cannot be made ({error.strerror}); "
            "choose another with --run DIR"
        ) from None
    if folder.configuration.exists():
        before, now = (
            essential_settings(load(folder.configuration)),
            essential_settings(configuration),
        )
        found = setting_changes(before, now)
        refuse_changes(found, f"{folder.path} holds a run", accepted, FOLDER_ADVICE)
    else:
        reach()
    text = json.dumps(
        {CODE_REVISION: code_revision(), **configuration.model_dump(mode="json")}, indent=2
    )
    # no process id: containers that share the folder all have the same
    partial = folder.configuration.with_suffix(f".{secrets.token_hex(8)}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, folder.configuration)
