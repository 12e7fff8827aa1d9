"""The files of a run's folder, and its log and store. The folder holds one run:
`write_configuration` refuses another configuration, so no log mixes two runs. A relative URL is
inside the folder.
"""

import json
import os
import secrets
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import ConfigurationError, CorruptObject
from rollstream.look.query.locate import url_inside
from rollstream.look.query.permissions import folder_of_url
from rollstream.os_failures import explain_os_error
from rollstream.revision import code_revision
from rollstream.run.config.config import (
    CODE_REVISION,
    SettingChange,
    essential_settings,
    load,
    refuse_changes,
    setting_changes,
)
from rollstream.run.config.recorded_form import file_form
from rollstream.run.config.settings import Configuration
from rollstream.storage.claim_check import open_log
from rollstream.storage.identity import DELETED, IDENTITY_KEY, RunIdentity
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import check_conditional_writes, open_store
from rollstream.storage.stores.json_objects import decode_json
from rollstream.streams.bus import Bus
from rollstream.streams.connect import check_reachable
from rollstream.streams.topics import catalogue

FOLDER_ADVICE = (
    "use its own configuration, choose another folder with --run DIR, or change the run "
    "for what comes next with --accept-config"
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The run folder of one run in `path`; they need not exist."""

    path: Path

    @property
    def configuration(self) -> Path:
        """Returns the configuration with the code's revision beside the settings."""
        return self.path / "config.json"

    @property
    def model(self) -> Path:
        """A Hugging Face folder, if the run made its model itself (warm-up)."""
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
    """Returns the folder, by default `runs/NAME`."""
    folder = Path(configuration.folder or f"runs/{configuration.run}")
    return RunFolder(folder.expanduser().absolute())


def bus_url(configuration: Configuration, folder: Path) -> str:
    """A relative path is inside the run's folder."""
    return url_inside(configuration.bus, folder)


def store_url(configuration: Configuration, folder: Path) -> str:
    """A relative path is inside the run's folder."""
    return url_inside(configuration.store, folder)


def is_deleted(configuration: Configuration, folder: Path) -> bool:
    """`rollstream rm` has left only parts of the run; a store elsewhere is not read."""
    path = folder_of_url(store_url(configuration, folder))
    if path is None:
        return False
    # A store that is open would make its folder.
    try:
        identity = decode_json((path / IDENTITY_KEY).read_bytes(), RunIdentity, IDENTITY_KEY)
    except (OSError, CorruptObject):
        return False
    return DELETED in identity.needs


def store_for_writing(configuration: Configuration, folder: Path) -> ObjectStore:
    """Raises `ConfigurationError` if the store ignores the condition of a conditional write, on
    which leases and versions depend.
    """
    store = open_store(store_url(configuration, folder), configuration.sync)
    check_conditional_writes(store, configuration.store, uuid.uuid4().hex)
    return store


def open_run_log_for_writing(configuration: Configuration, folder: Path) -> Bus:
    """Records that are too large are kept in the store, behind claim checks."""
    urls = bus_url(configuration, folder), store_url(configuration, folder)
    return open_log(*urls, configuration.sync)


def run_folder(path: str | Path) -> RunFolder:
    """Returns the folder of an existing run; `path` is it or the `config.json` in it. Raises
    `ConfigurationError` if it holds no `config.json`.
    """
    place = Path(path).absolute()
    folder = RunFolder(place.parent if place.name == "config.json" else place)
    if not folder.configuration.exists():
        raise ConfigurationError(f"{folder.path} holds no run (no config.json there)")
    return folder


# config.json is written last.
_UNFINISHED = frozenset(["bus", "store", "model", "logs", "metrics"])


def require_new(folder: Path, advice: str, command: str) -> None:
    """Raises `ConfigurationError` unless the folder is missing or empty; the error names a
    `command` that may have left its files.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file; {advice}")
    names = {path.name for path in folder.iterdir()}
    if names:
        leftover = f" (perhaps a {command} that was not finished)" if names <= _UNFINISHED else ""
        raise ConfigurationError(f"{folder} is not empty{leftover}; {advice}")


def reach(configuration: Configuration, folder: Path) -> ObjectStore:
    """Checks that log and store can be reached and written; creates the topics."""
    check_reachable(configuration.bus)
    with closing(open_run_log_for_writing(configuration, folder)) as bus:
        bus.create(catalogue())
    return store_for_writing(configuration, folder)


def check_changes(
    folder: RunFolder, configuration: Configuration, accepted: bool
) -> list[SettingChange]:
    """Returns the changes since the run in this folder. Raises `ConfigurationError` as
    `write_configuration` does.
    """
    recorded = essential_settings(load(folder.configuration))
    changes = setting_changes(recorded, essential_settings(configuration))
    where = f"{folder.path} holds a run"
    refuse_changes(changes, where, accepted, FOLDER_ADVICE, configuration)
    return changes


def write_configuration(
    folder: RunFolder,
    configuration: Configuration,
    accepted: bool = False,
    reach: Callable[[], object] = lambda: None,
) -> None:
    """Writes `config.json`, atomically. Raises `ConfigurationError` if it exists with other
    settings that are not incidental, unless the change is `accepted` and none is fixed.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the run's folder {folder.path} cannot be made: {explain_os_error(error)} "
            "(--run DIR names another)"
        ) from None
    if folder.configuration.exists():
        check_changes(folder, configuration, accepted)
    else:
        # A mistyped URL would stay in the folder, and the corrected command would be refused.
        reach()
    text = json.dumps(
        {CODE_REVISION: code_revision(), **file_form(configuration, Configuration())}, indent=2
    )
    # A random name instead of the process id, which is equal in containers that share the folder.
    partial = folder.configuration.with_suffix(f".{secrets.token_hex(8)}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, folder.configuration)
