"""Locates a run's log, store and files from the argument of a command."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, OutsideRun
from rollstream.foreign_json import parse_loose_json
from rollstream.look.query.own_runs import folder_key, own_run
from rollstream.look.query.permissions import folder_of_url, run_id

if TYPE_CHECKING:
    from rollstream.storage.archive.file_names import ArchiveFile

# The configuration is read as plain JSON, not as `config.settings.Configuration`: a query needs a
# few keys, and importing the validation takes longer than the query.
RUNS_FOLDER = Path("runs")
ARCHIVE_FOLDER = "archive"
CONFIGURATION = "config.json"
_OF_A_MODEL = {"model_type", "architectures"}  # keys of the `config.json` of a model
REPLAY_FILE = "replay.json"  # marks a folder that a replay wrote, where no role may resume the run
SIMULATION_FILE = "simulation.json"  # the results of a simulation, in a folder of their own


@dataclass(frozen=True)
class RunLocation:
    """`name` is for messages; `store` and `bus` are URLs with absolute paths. `bus` is None without
    a log (the archive is read alone), `folder` (the run's, or of a store alone the store's) if only
    a remote store is known, `run` (the run's name) if the archive must name it. `configuration` is
    empty without config.json.
    """

    name: str
    store: str
    bus: str | None = None
    sync: str = "normal"
    run: str | None = None
    folder: Path | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_trusted: bool = False
    """By `--trust`: the code that the run names may be imported."""
    named: tuple[str, ...] = ()
    """URLs on the user's command line."""

    @cached_property
    def files(self) -> ContainedFolder:
        """Links are followed only inside the run's folder and into folders that the user named.
        Raises `ConfigurationError` if the run has no folder.
        """
        if self.folder is None:
            raise ConfigurationError(f"{self.name} has no folder, only a store")
        return ContainedFolder(self.folder, lambda: map(Path, own_run(self.key).folders))

    @cached_property
    def id(self) -> str:
        """Returns the id in the store; "" if it cannot be read."""
        stored_id = run_id(self.store, self.named) if self.has_store else ""
        return "" if len(stored_id) == len(folder_key(Path())) else stored_id

    @property
    def key(self) -> str:
        """Returns the key in the user's private folder: the run's id, or its folder without one."""
        return self.id or ("" if self.folder is None else folder_key(self.folder))

    def has_file(self, *parts: str) -> bool:
        """A regular file."""
        return self.folder is not None and self.files.has_file(*parts)

    @property
    def is_replay(self) -> bool:
        return self.has_file(REPLAY_FILE)

    @property
    def evaluations(self) -> Path | None:
        """`metrics/eval.jsonl`; None without it."""
        parts = ("metrics", "eval.jsonl")
        return self.files.path(*parts) if self.has_file(*parts) else None

    @property
    def has_store(self) -> bool:
        """False if the store is a missing folder."""
        folder = folder_of_url(self.store)
        return folder is None or folder.is_dir()

    @property
    def max_lag(self) -> int | None:
        """`dispatch.max_lag`; None if it is unbounded or unknown."""
        lag = self.table("dispatch").get("max_lag")
        return lag if isinstance(lag, int) else None

    @property
    def process_rewards(self) -> bool:
        return bool(self.table("trainer").get("process_rewards", False))

    def table(self, name: str) -> Mapping[str, Any]:
        """Returns the table of the configuration; {} if it has none."""
        values = self.configuration.get(name)
        return cast("Mapping[str, Any]", values) if isinstance(values, dict) else {}


def locate_run(argument: str | None, is_trusted: bool = False) -> RunLocation:
    """Locates a run's folder, its config.json, an archive, or a store's URL (None: the newest run).
    Raises `ConfigurationError` if neither a run nor an archive is there; a URL of another scheme
    than `file:` is not checked.
    """
    if argument is None:
        return locate_run(str(newest_run(RUNS_FOLDER)), is_trusted)
    argument = run_path(argument)
    scheme, separator, rest = argument.partition(":")
    if separator and scheme != "file" and not os.path.exists(argument):
        store = argument.rstrip("/").removesuffix(f"/{ARCHIVE_FOLDER}")
        return RunLocation(argument, store, is_trusted=is_trusted, named=(store,))
    path = Path(rest.removeprefix("//") if separator and scheme == "file" else argument).absolute()
    if path.is_file() and path.suffix == ".json":
        location = _configured(path.parent, path.name)
    elif may_hold_run(path):
        location = _configured(path, CONFIGURATION)
    else:
        location = _archive_alone(path, argument)
    return replace(location, is_trusted=is_trusted)


def run_path(argument: str) -> str:
    """`runs/NAME` for the name of a run there, unless the present folder has that name; otherwise
    the argument unchanged.
    """
    in_runs = os.path.join(RUNS_FOLDER, argument)
    # The argument may be any text, for instance a query: a text that cannot be a path does not
    # exist.
    is_there = "/" not in argument and not os.path.exists(argument) and os.path.isdir(in_runs)
    return in_runs if is_there else argument


def locate_asked_run(
    argument: str | None, name: str | None, warn: Callable[[str], None], is_trusted: bool = False
) -> RunLocation:
    """Locates a command's RUN; `name` selects a run in an archive that holds several. Without RUN
    the newest is taken, and `warn` receives its name.
    """
    location = locate_run(argument, is_trusted)
    if argument is None:
        warn(f"using the newest run, {location.name}")
    return location if name is None else replace(location, run=name)


def may_hold_run(folder: Path) -> bool:
    """Whether it has the `config.json` of a run, and not of a model; True if it cannot be read."""
    if not (folder / CONFIGURATION).exists():
        return False
    try:
        values = parse_loose_json(ContainedFolder(folder).read(CONFIGURATION))
    except (OSError, ValueError, OutsideRun):
        return True
    return not isinstance(values, dict) or "run" in values or not _OF_A_MODEL & values.keys()


def newest_run(runs: Path) -> Path:
    """The folder in `runs` with the most recently written config.json. Raises `ConfigurationError`
    if there is none.
    """
    paths = [path for path in runs.glob("*/config.json") if may_hold_run(path.parent)]
    if not paths:
        raise ConfigurationError(
            f"{runs.absolute()} holds no run; name one: a run's folder, its config.json, "
            "or an archive (a folder or URL)"
        )
    return max(paths, key=lambda path: path.stat().st_mtime).parent


def _archive_alone(path: Path, argument: str) -> RunLocation:
    if not path.is_dir():
        raise ConfigurationError(f"{argument}: no such run or archive; is the path right?")
    # A store, the `archive/` in a store, or a run's folder that has lost its config.json.
    if path.name == ARCHIVE_FOLDER and any(path.glob("topic=*")):
        path = path.parent
    for store in (path, path / "store"):
        if (store / ARCHIVE_FOLDER).is_dir():
            return RunLocation(argument, f"file:{store}", folder=path)
    raise ConfigurationError(
        f"{path} holds neither a run (no config.json there) "
        f"nor an archive (no folder {ARCHIVE_FOLDER}/)"
    )


def _configured(folder: Path, file: str) -> RunLocation:
    configuration = read_configuration(folder / file)
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


def read_configuration(path: Path) -> dict[str, Any]:
    """Raises `ConfigurationError` if `config.json` holds no table, `OutsideRun` if it is no regular
    file of its folder.
    """
    try:
        values = parse_loose_json(ContainedFolder(path.parent).read(path.name))
    except OutsideRun:
        raise
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a run's configuration: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} is not a run's configuration: it holds no table")
    return cast("dict[str, Any]", values)


def url_inside(url: str, folder: Path) -> str:
    """A relative path after `sqlite:` or `file:` is made absolute inside the folder."""
    scheme, _, rest = url.partition(":")
    if scheme not in ("sqlite", "file") or rest.startswith("/"):
        return url
    return f"{scheme}:{folder / Path(rest).expanduser()}"


def archived_run(location: RunLocation, files: "Iterable[ArchiveFile]") -> str:
    """Returns the only run among the archive's `files`. Raises `ConfigurationError` if there are
    none or several.
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
