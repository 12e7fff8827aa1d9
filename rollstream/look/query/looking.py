"""Opens a run for a reader. It may come from another user, so all commands that only read open a
run here, with these guarantees (SECURITY.md):

* Nothing is written, made, locked or cleaned up.
* A link that leaves the run's folder is refused, unless the user named its target, and so are files
  that are not regular.
* No module that the run names is imported, unless the user began the run on this machine, trusts
  it, or gives `--trust`.
* Secrets are sent only to hosts that the user named.
"""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, OutsideRun
from rollstream.look.query.locate import CONFIGURATION, RunLocation, archived_run
from rollstream.look.query.own_runs import code_names, is_named, permits_code
from rollstream.look.query.permissions import check_hosts, folder_of_url

if TYPE_CHECKING:  # opening a run imports them
    from rollstream.storage.archive.log_view import LogView
    from rollstream.storage.stores.base import ObjectStore
    from rollstream.streams.bus import Bus


def open_run_store(location: RunLocation, deadline_s: float = inf) -> "ObjectStore":
    """Raises `ConfigurationError` if the run has none."""
    from rollstream.storage.stores.read_only import open_store_for_reading

    if not location.has_store:
        raise ConfigurationError(f"{location.name} has no store: {location.store} is missing")
    return open_store_for_reading(location.store, _contained(location, location.store), deadline_s)


def open_run_log(location: RunLocation, store_s: float = inf) -> "Bus":
    """Opens the log, which the location must have. Records too large for the log are read from the
    store, if there is one. Raises `BusError` within seconds if no Kafka broker accepts a
    connection.
    """
    from rollstream.storage.claim_check import ClaimCheck

    bus = open_stored_log(location)
    return ClaimCheck(bus, open_run_store(location, store_s)) if location.has_store else bus


def open_stored_log(location: RunLocation) -> "Bus":
    """Opens the stored log as it is stored for a copy: a large record is its claim."""
    from rollstream.streams.connect import check_reachable, open_bus_for_reading

    assert location.bus is not None
    folder = _contained(location, location.bus)
    check_reachable(location.bus)
    return open_bus_for_reading(location.bus, folder)


@contextmanager
def open_run_view(location: RunLocation, store_s: float = inf) -> Generator["LogView"]:
    """Log and archive as one read-only log; one of them may be missing."""
    with closing(run_view(location, store_s)) as view:
        yield view


def run_view(location: RunLocation, store_s: float = inf) -> "LogView":
    """Opens the view for the caller to close. No read of the store waits longer than `store_s`."""
    from rollstream.storage.archive.log_view import LogView
    from rollstream.storage.archive.reading import archived_files

    store = open_run_store(location, store_s) if location.has_store else None
    run = location.run
    if run is None:
        run = "run" if store is None else archived_run(location, archived_files(store))
    bus = None if location.bus is None else open_run_log(location, store_s)
    return LogView(bus, store, run)


def _contained(location: RunLocation, url: str) -> ContainedFolder | None:
    """Returns the folder of a local log or store, None for a remote one. Raises
    `ConfigurationError` for a folder outside of the run's, or a host, that the user did not name.
    """
    folder = folder_of_url(url)
    if folder is None:
        _check_token(location, url)
        check_hosts(location.name, url, location.named)
        return None
    if location.folder is None:
        return ContainedFolder(folder)
    if url in location.named or is_named(url):
        return ContainedFolder(folder, lambda: (*location.files.also, location.files.root))
    real = location.files.path(folder)  # a link or a path out of the run's folder is refused here
    return ContainedFolder(real, lambda: (*location.files.also, location.files.root))


def _check_token(location: RunLocation, url: str) -> None:
    from rollstream.streams.kind import bus_kind

    # The log's URL may name a function to import.
    kind = bus_kind(url)
    token = "" if kind is None else kind.function(url)
    if token and not permits_run_code(location, (token,)):
        raise ConfigurationError(
            f"{location.name}: the URL of its log names the function {token}, which is not "
            "imported, because you did not begin this run on this machine; --trust imports it"
        )


def permits_run_code(location: RunLocation, names: tuple[str, ...]) -> bool:
    """The code of these import paths may be imported: the user gave `--trust`, or began or trusted
    this run with these names.
    """
    if not names or location.is_trusted:
        return True
    # A module in the run's own folder may have been exchanged.
    return permits_code(names, location.id) and not any(
        _is_inside_run(location, name) for name in names
    )


def _is_inside_run(location: RunLocation, name: str) -> bool:
    if location.folder is None:
        return False
    module = name.partition(":")[0].partition(".")[0]
    # As `find_callable`, which puts the working directory last; nothing is imported here.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return True
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    run = Path(os.path.realpath(location.folder))
    return any(Path(os.path.realpath(place)).is_relative_to(run) for place in places if place)


def refused_code(location: RunLocation, table: str = "trainer") -> tuple[str, ...]:
    """Returns import paths in a table of the configuration that may not be imported."""
    names = tuple(sorted(code_names({table: location.table(table)})))
    return () if permits_run_code(location, names) else names


def require_code(location: RunLocation, *tables: str) -> None:
    """Raises `ConfigurationError` if a command that uses these tables of the run's settings (by
    default all) as its own would import code that may not be imported.
    """
    used = {name: location.table(name) for name in tables} or location.configuration
    names = tuple(sorted(code_names(used)))
    if not permits_run_code(location, names):
        raise ConfigurationError(
            f"{location.name} names code of its own, {', '.join(names)}, which this command would "
            "import; you did not begin the run on this machine: read the code, then give --trust"
        )


def model_file(location: RunLocation, name: str) -> bytes | None:
    """A small one of the starting model, e.g. `tokenizer.json`: from the run's folder, from the
    folder of `model.path` if the run is the user's own, or from the store; None without it.
    """
    from rollstream.storage.model_folder.hf_folder import find_hf_folder
    from rollstream.storage.starting_model.manifest import read_model_manifest
    from rollstream.storage.starting_model.reading import StoredModel

    if location.folder is None:
        return None
    path = location.table("model").get("path")
    if isinstance(path, str) and _is_own(location):
        # The user's own folder: its files may be links, as in the cache of the Hub.
        file = Path(os.path.realpath(find_hf_folder(path) / name))
        if file.is_file():
            return ContainedFolder(file.parent).read(file.name)
    for folder in ("model",) if name == CONFIGURATION else ("model", "."):
        if location.has_file(folder, name):
            return location.files.read(folder, name)
    if not (location.configuration and location.has_store):
        return None
    with suppress(OutsideRun):
        store = open_run_store(location)
        manifest = read_model_manifest(store)
        if manifest is not None and any(entry.name == name for entry in manifest.files):
            return StoredModel(store, manifest).fetch(name)
    return None


def metrics_folder(location: RunLocation) -> Path:
    """It may be missing. Raises `OutsideRun` if it, or a file in it, leaves the run's folder or is
    not regular.
    """
    if location.folder is None:
        return Path(os.devnull)  # holds no file
    folder = location.files.path("metrics")
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if entry.name.endswith(".jsonl") and not entry.is_dir(follow_symlinks=False):
            location.files.file(folder, entry.name)
    return folder


def _is_own(location: RunLocation) -> bool:
    from rollstream.private_state import read_private

    key = location.id
    return location.is_trusted or (bool(key) and read_private(f"runs/{key}.json") is not None)


def trainer_settings(location: RunLocation) -> Mapping[str, Any]:
    """Returns the settings without settings whose code may not be imported."""
    values, names = location.table("trainer"), refused_code(location)
    # The advantage is a part of the rule which samples are trained: a default would make another
    # rule than the run's.
    if "advantage" in values and values["advantage"] in names:
        return {}
    return {key: value for key, value in values.items() if value not in names}
