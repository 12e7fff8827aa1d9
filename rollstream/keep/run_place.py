"""Locates the run that a command names, and proves that the folder is this run: its store has
`run.json` with the run's name. Names prove nothing: a project has folders `model/` and `weights/`,
and a config.json, too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_json
from rollstream.look.query.locate import REPLAY_FILE, locate_run
from rollstream.look.query.own_runs import is_named
from rollstream.look.query.permissions import check_hosts, folder_of_url
from rollstream.printable import shell_command
from rollstream.run.config.config import url_identity
from rollstream.run.config.run_files import CONFIGURATION_FILE, LOCKS, REMOVAL_FILE
from rollstream.storage.identity import IDENTITY_KEY, RunIdentity, read_identity
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.read_only import open_store_for_reading
from rollstream.streams.removal import LogContents, log_run_id
from rollstream.whole_file import whole_file


@dataclass(frozen=True, slots=True)
class RunPlace:
    """`folder`, and the URLs of log (`bus`) and `store`. Paths are absolute; None for a part that
    does not exist or is not to be deleted.
    """

    run: str
    folder: Path | None
    bus: str | None
    store: str | None


def open_present(store_url: str | None) -> ObjectStore | None:
    """Returns None for a folder that does not exist."""
    folder = None if store_url is None else folder_of_url(store_url)
    if store_url is None or (folder is not None and not folder.is_dir()):
        return None
    # Opening a missing folder would create it.
    return open_store(store_url)


def open_present_for_reading(store_url: str | None) -> ObjectStore | None:
    folder = None if store_url is None else folder_of_url(store_url)
    if store_url is None or (folder is not None and not folder.is_dir()):
        return None
    return open_store_for_reading(store_url, None if folder is None else ContainedFolder(folder))


def find_run_place(argument: str, bus: str | None = None, *, or_emptied: bool = False) -> RunPlace:
    """Finds the run place by folder, config.json, or the URL of store or log. `bus` is the log of a
    run named by its store. Raises `ConfigurationError` if no run is there; `or_emptied` accepts an
    empty store as the place of a removed run.
    """
    scheme, separator, _ = argument.partition(":")
    if separator and scheme in ("kafka", "sqlite"):
        if bus is not None:
            raise ConfigurationError(
                f"--bus {bus}: {argument} is a log already; name the store first"
            )
        return RunPlace(url_identity(argument), None, argument, None)
    if separator and not os.path.exists(argument):
        store = open_present_for_reading(argument)
        identity = None if store is None else read_identity(store)
        if identity is None and not (or_emptied and _is_emptied(argument, store)):
            raise ConfigurationError(
                f"{argument} holds no run (no {IDENTITY_KEY}), so nothing there is a run's; "
                "is the URL right?"
            )
        run = url_identity(argument) if identity is None else identity.run
        return RunPlace(run, None, bus, argument)
    path = Path(argument).absolute()
    folder = path.parent if path.name == CONFIGURATION_FILE else path
    if bus is not None:
        raise ConfigurationError(f"--bus {bus}: {folder}/config.json names the run's log already")
    if not (folder / CONFIGURATION_FILE).is_file():
        if _is_nearly_removed(folder):
            return RunPlace(folder.name, folder, None, None)
        raise ConfigurationError(f"{folder} holds no run (no config.json there); is it right?")
    location = locate_run(str(folder))
    return RunPlace(location.run or folder.name, folder, location.bus, location.store)


def _is_emptied(store_url: str, store: ObjectStore | None) -> bool:
    if store is not None:
        # A mistyped prefix of an existing bucket cannot be told from it.
        return next(store.list(), None) is None
    folder = folder_of_url(store_url)
    return folder is not None and folder.parent.is_dir()


def _is_nearly_removed(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    # A removal deletes these after config.json.
    return REMOVAL_FILE in names or names == {"run.lock"} or (bool(names) and names <= {*LOCKS})


@dataclass(frozen=True, slots=True)
class RunProof:
    """`id` is "" for a replay of an earlier release. `in_store` is False once a removal has deleted
    all objects of the run: those in the store are then not the run's.
    """

    id: str
    in_store: bool
    in_folder: bool = True


def prove_run(place: RunPlace, store: ObjectStore | None, log: LogContents | None) -> RunProof:
    """Raises `ConfigurationError` without a proof.

    A run named by its folder is proven by `run.json` in its store, with the name in config.json; by
    `removing.json` of an interrupted removal, whose last object of the store is `run.json`; or by
    `replay.json`, for a replay of an earlier release.
    """
    proof = _prove(place, store, log)
    other = log_run_id(place.bus) if place.bus is not None and log and proof.id else ""
    if other not in ("", proof.id):
        raise ConfigurationError(
            f"the log {place.bus} is of another run ({other}) than the store {place.store} "
            f"({proof.id}): nothing was deleted; name the log or the store alone, by its URL"
        )
    return proof


def _prove(place: RunPlace, store: ObjectStore | None, log: LogContents | None) -> RunProof:
    identity = None if store is None else read_identity(store)
    mark = None if place.folder is None else read_removal(place.folder)
    if identity is not None:
        _check_same(place, identity, mark)
        return RunProof(identity.id, True)
    if mark is not None:
        return RunProof(str(mark.get("id", "")), False)
    if place.folder is None:
        if place.store is None and place.bus is not None and not _is_log(place.bus, log):
            raise ConfigurationError(
                f"{place.bus} holds no log of a run (no ledger), so nothing was deleted; is the "
                "URL right?"
            )
        return RunProof("", False)
    if _is_nearly_removed(place.folder):
        return RunProof("", False)
    if not (place.folder / CONFIGURATION_FILE).exists() and store is None and not log:
        return RunProof("", False, False)
    if _json_object(place.folder / REPLAY_FILE) is not None and _is_inside(place):
        return RunProof("", True)
    raise ConfigurationError(
        f"{place.folder} holds no run: {place.store} has no {IDENTITY_KEY}, by which a run's "
        "objects are known, so nothing was deleted; if the folder is yours, delete it yourself"
    )


def check_permitted(place: RunPlace, is_confirmed: bool) -> None:
    """Raises `ConfigurationError` if a run's folder, which may come from another user, names a log
    or store outside of it that the user did not name: its host gets no secret (`check_hosts`), and
    nothing there is deleted with `--yes` (`is_confirmed`).
    """
    if place.folder is None:
        return
    files = run_files(place)
    for url in (place.bus, place.store):
        if url is None or is_named(url):
            continue
        folder = folder_of_url(url)
        if folder is None:
            check_hosts(str(place.folder), url, ())
        elif files is not None and files.contains(Path(os.path.realpath(folder))):
            continue  # inside the run, or where the user named that a link of it may lead
        if is_confirmed:
            raise ConfigurationError(
                f"{place.folder} names {url}, which is outside of it, and you did not begin this "
                "run on this machine: remove it without --yes, and read what is shown; or name "
                f"the store by its URL: "
                + shell_command("rm", place.store, "--bus", place.bus, "--yes")
            )


def run_files(place: RunPlace) -> ContainedFolder | None:
    """Returns the run's folder with the folders to which its links may lead."""
    folder = place.folder
    if folder is None or not (folder / CONFIGURATION_FILE).is_file():
        return None if folder is None else ContainedFolder(folder)
    return locate_run(str(folder)).files


def _check_same(place: RunPlace, identity: RunIdentity, mark: Mapping[str, Any] | None) -> None:
    if place.folder is None:
        return
    if identity.run != place.run:
        raise ConfigurationError(
            f"{place.folder} names the run {place.run!r}, and its store {place.store} holds the "
            f"run {identity.run!r}: nothing was deleted; name the run to remove by its store's URL"
        )
    if mark is not None and mark.get("id", identity.id) != identity.id:
        raise ConfigurationError(
            f"{place.store} holds another run ({identity.id}) than the one whose removal from "
            f"{place.folder} was interrupted ({mark.get('id')}): nothing was deleted; delete the "
            "folder yourself"
        )


def _is_log(url: str, log: LogContents | None) -> bool:
    folder = folder_of_url(url)
    if log:
        return log.has_ledger
    # A removal leaves nothing of a log.
    return folder is None or not folder.is_dir() or not any(folder.iterdir())


def _is_inside(place: RunPlace) -> bool:
    assert place.folder is not None
    inside = place.folder.resolve()
    folders = [folder_of_url(url) for url in (place.bus, place.store) if url is not None]
    return all(path is not None and path.resolve().is_relative_to(inside) for path in folders)


def write_removal(folder: Path, run: str, run_id: str) -> None:
    """Marks a removal, atomically; the caller has deleted nothing yet."""
    with whole_file(folder / REMOVAL_FILE) as partial:
        partial.write_text(json.dumps({"run": run, "id": run_id}) + "\n", encoding="utf-8")


def read_removal(folder: Path) -> Mapping[str, Any] | None:
    return _json_object(folder / REMOVAL_FILE)


def _json_object(path: Path) -> Mapping[str, Any] | None:
    try:
        return parse_json(ContainedFolder(path.parent).read(path.name), dict[str, Any])
    except (OSError, ValueError):  # a file of another program, a link, or a pipe
        return None
