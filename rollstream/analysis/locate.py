"""Locates a run's log, store (which holds the archive) and files from the argument of a command: a
run's folder, its config.json, an archive, or a store's URL. `open_run_log` and `open_run_view` open
what was found. Nothing is created; a run whose log is missing is read from its archive alone.

The configuration is read as plain JSON, not as `config.settings.Configuration`: a query needs a few
keys, and importing the validation takes longer than the query.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rollstream.errors import ConfigurationError

if TYPE_CHECKING:  # opening a run imports them
    from rollstream.storage.archive.file_names import ArchiveFile
    from rollstream.storage.log_view import LogView
    from rollstream.streams.bus import Bus

RUNS_FOLDER = Path("runs")
ARCHIVE_FOLDER = "archive"
REPLAY_FILE = "replay.json"  # marks a folder that a replay wrote, where no role may resume the run
SIMULATION_FILE = "simulation.json"  # the results of a simulation, in a folder of their own


@dataclass(frozen=True, slots=True)
class RunLocation:
    """States where a run's data is. `name` names it in messages; `store` and `bus` are URLs with
    absolute paths. `bus` is None if there is no log, `folder` (the run's or, for a store alone, the
    store's) if only the URL of a remote store is known, and `run` (the run's name) if it must be
    read from the archive. `configuration` is the content of config.json, empty without that file.
    """

    name: str
    store: str
    bus: str | None = None
    sync: str = "normal"
    run: str | None = None
    folder: Path | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def evaluations(self) -> Path | None:
        """Returns the path of `metrics/eval.jsonl`; None without a folder."""
        return None if self.folder is None else self.folder / "metrics" / "eval.jsonl"

    @property
    def has_store(self) -> bool:
        """Returns False if the store is a missing folder, which opening the store would create."""
        scheme, _, rest = self.store.partition(":")
        return scheme != "file" or Path(rest.removeprefix("//")).is_dir()

    @property
    def max_lag(self) -> int | None:
        """Returns the setting `dispatch.max_lag`; None if it is unbounded or unknown."""
        return cast("int | None", self.configuration.get("dispatch", {}).get("max_lag"))

    @property
    def process_rewards(self) -> bool:
        """Returns the setting `trainer.process_rewards`."""
        return bool(self.configuration.get("trainer", {}).get("process_rewards", False))

    def tokenizers(self) -> tuple[Path, ...]:
        """Returns the possible paths of the run's `tokenizer.json`, the preferred one first. If
        none of them exists, the files of the starting model in the run's store are written into the
        folder `model`, verified.
        """
        if self.folder is None:
            return ()
        named = self.configuration.get("model", {}).get("path")
        folders = (Path(named),) if named else ()
        model = self.folder / "model"
        found = tuple(f / "tokenizer.json" for f in (*folders, model, self.folder))
        if self.configuration and self.has_store and not any(path.is_file() for path in found):
            _fetch_model_files(self.store, model)
        return found


def _fetch_model_files(url: str, folder: Path) -> None:
    """Write configuration and tokenizer of the store's starting model, if it has one."""
    from rollstream.storage.starting_model.manifest import read_model_manifest
    from rollstream.storage.starting_model.reading import StoredModel
    from rollstream.storage.stores.connect import open_store

    store = open_store(url)
    manifest = read_model_manifest(store)
    if manifest is not None:
        StoredModel(store, manifest).host_folder("", None, folder)


def locate_run(named: str | None) -> RunLocation:
    """Returns the location of `named` (a path or URL); None means the newest run in `RUNS_FOLDER`.
    Raises `ConfigurationError` if neither a run nor an archive is there. A URL of another scheme
    than `file:` is taken as the store's, or its archive's, without a check.
    """
    if named is None:
        return locate_run(str(newest_run(RUNS_FOLDER)))
    scheme, separator, rest = named.partition(":")
    if separator and scheme != "file" and not Path(named).exists():
        return RunLocation(named, named.rstrip("/").removesuffix(f"/{ARCHIVE_FOLDER}"))
    path = Path(rest.removeprefix("//") if separator and scheme == "file" else named).absolute()
    if path.is_file() and path.suffix == ".json":
        return _configured(path.parent, path)
    if (path / "config.json").is_file():
        return _configured(path, path / "config.json")
    return _archive_alone(path, named)


def locate_asked_run(
    named: str | None, name: str | None, warn: Callable[[str], None]
) -> RunLocation:
    """Returns the location that a command line names: `named` is its RUN, and `name` selects a run
    in an archive that holds several. Without `named` the newest run is taken, and `warn` receives a
    message with its name.
    """
    location = locate_run(named)
    if named is None:
        warn(f"using the newest run, {location.name}")
    return location if name is None else replace(location, run=name)


def newest_run(runs: Path) -> Path:
    """Returns the folder in `runs` with the most recently written config.json. Raises
    `ConfigurationError` if there is none.
    """
    found = sorted(runs.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigurationError(
            f"{runs.absolute()} holds no run; name one: a run's folder, its config.json, "
            "or an archive (a folder or URL)"
        )
    return found[-1].parent


def _archive_alone(path: Path, named: str) -> RunLocation:
    """Returns the location of a folder without config.json: a store, the `archive/` in a store, or
    a run's folder that has lost its config.json. Raises `ConfigurationError` for any other path.
    """
    if not path.is_dir():
        raise ConfigurationError(f"{named}: no such run or archive; is the path right?")
    if path.name == ARCHIVE_FOLDER and any(path.glob("topic=*")):
        path = path.parent
    for store in (path, path / "store"):
        if (store / ARCHIVE_FOLDER).is_dir():
            return RunLocation(named, f"file:{store}", folder=path)
    raise ConfigurationError(
        f"{path} holds neither a run (no config.json there) "
        f"nor an archive (no folder {ARCHIVE_FOLDER}/)"
    )


def _configured(folder: Path, path: Path) -> RunLocation:
    """Returns the location that the configuration at `path` states; relative paths in it are inside
    `folder`.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a run's configuration: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} is not a run's configuration: it holds no table")
    configuration = cast("dict[str, Any]", values)
    bus = url_inside(str(configuration.get("bus", "sqlite:bus")), folder)
    scheme, _, rest = bus.partition(":")
    return RunLocation(
        str(folder),
        url_inside(str(configuration.get("store", "file:store")), folder),
        None if scheme == "sqlite" and not Path(rest).is_dir() else bus,
        str(configuration.get("sync", "normal")),
        str(configuration.get("run", "run")),
        folder,
        configuration,
    )


def url_inside(url: str, folder: Path) -> str:
    """Returns the URL; a relative path after `sqlite:` or `file:` is made absolute inside the
    folder.
    """
    scheme, _, rest = url.partition(":")
    if scheme not in ("sqlite", "file") or rest.startswith("/"):
        return url
    return f"{scheme}:{folder / rest}"


def open_run_log(location: RunLocation) -> "Bus":
    """Opens the run's log, which the location must have; creates neither topics nor a missing
    store. Records too large for the log are read from the store, if there is one. Raises `BusError`
    within seconds if no Kafka broker accepts a connection.
    """
    from rollstream.storage.claim_check import open_log
    from rollstream.streams.connect import check_reachable, open_bus

    assert location.bus is not None
    check_reachable(location.bus)
    sync = cast('Literal["normal", "full"]', location.sync)
    if not location.has_store:
        return open_bus(location.bus, sync=sync)
    return open_log(location.bus, location.store, sync)


@contextmanager
def open_run_view(location: RunLocation) -> Generator["LogView"]:
    """Opens log and archive of the run as one read-only log (`LogView`); one may be missing."""
    from rollstream.storage.archive.reading import archived_files
    from rollstream.storage.log_view import LogView
    from rollstream.storage.stores.connect import open_store

    store = open_store(location.store) if location.has_store else None
    run = location.run
    if run is None:
        run = "run" if store is None else archived_run(location, archived_files(store))
    bus = None if location.bus is None else open_run_log(location)
    with closing(LogView(bus, store, run)) as view:
        yield view


def archived_run(location: RunLocation, files: "Iterable[ArchiveFile]") -> str:
    """Returns the name of the only run among the archive's `files`. Raises `ConfigurationError` if
    there are none or several.
    """
    runs = sorted({file.run for file in files})
    if len(runs) > 1:
        raise ConfigurationError(
            f"{location.name} holds the archives of {len(runs)} runs ({', '.join(runs[:8])}): name "
            "one with --name NAME"
        )
    if not runs:
        raise ConfigurationError(f"{location.name} holds no archive of a run; is the path right?")
    return runs[0]
