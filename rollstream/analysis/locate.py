"""Locates a run's log, archive and files from a user's argument: a run's folder, its config.json,
an archive, or a store's URL.

The configuration is read as plain JSON, not as `config.Configuration`: a query needs four keys, and
importing the validation takes longer than the query. Nothing is created. A missing log folder is
not an error: the archive suffices.
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
REPLAY_FILE = "replay.json"  # marks the folder of a replay, which no role may resume


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Where a run's data is. URLs are absolute. `bus` is None without a log, `folder` None for a
    bare store, `run` None if its name must be read from the archive.
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
        """Path of `metrics/eval.jsonl`; None without a folder."""
        return None if self.folder is None else self.folder / "metrics" / "eval.jsonl"

    @property
    def has_store(self) -> bool:
        """False if the store's folder does not exist: opening the store would create it."""
        scheme, _, rest = self.store.partition(":")
        return scheme != "file" or Path(rest.removeprefix("//")).is_dir()

    @property
    def max_lag(self) -> int | None:
        """`dispatch.max_lag`; None if unbounded or unknown."""
        return cast("int | None", self.configuration.get("dispatch", {}).get("max_lag"))

    def tokenizers(self) -> tuple[Path, ...]:
        """Possible paths of the run's `tokenizer.json`, in order of preference."""
        if self.folder is None:
            return ()
        named = self.configuration.get("model", {}).get("path")
        folders = (Path(named),) if named else ()
        return tuple(f / "tokenizer.json" for f in (*folders, self.folder / "model", self.folder))


def locate_run(named: str | None) -> RunLocation:
    """Returns the location of `named`; None means the newest run in `RUNS_FOLDER`."""
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
    """Returns the location that a command line names. `name` selects a run of an archive. If
    `named` is None, `warn` receives a message that names the newest run.
    """
    location = locate_run(named)
    if named is None:
        warn(f"using the newest run, {location.name}")
    return location if name is None else replace(location, run=name)


def newest_run(runs: Path) -> Path:
    """Returns the folder in `runs` with the most recently written configuration."""
    found = sorted(runs.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigurationError(
            f"{runs.absolute()} holds no run; name one: a run's folder, its config.json, "
            "or an archive (a folder or URL)"
        )
    return found[-1].parent


def _archive_alone(path: Path, named: str) -> RunLocation:
    """Locates a folder without config.json: a store, its `archive/`, or a run's folder whose
    configuration is missing.
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
    """The URL with a relative path of `sqlite:` or `file:` inside the folder."""
    scheme, _, rest = url.partition(":")
    if scheme not in ("sqlite", "file") or rest.startswith("/"):
        return url
    return f"{scheme}:{folder / rest}"


def open_run_log(location: RunLocation) -> "Bus":
    """Opens the run's log; creates neither topics nor a missing store. Raises `BusError` at once if
    no broker accepts a connection.
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
    """The run's log with its archive in front of it, to be read and never changed."""
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
    """Returns the name of the archive's only run; raises `ConfigurationError` if it holds none or
    several.
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
