"""Deletes a run: its consumer groups and topics, its objects, its folder, and nothing of another
run (`rollstream rm`, docs/how-to/delete-and-retain.md).

`check_not_living` refuses a run with living processes; `plan_removal` lists what there is to delete
and to keep, for the user to confirm; `remove` deletes what the plan lists. The same request,
repeated after an interruption at any point, deletes the rest.
"""

import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Literal

from rollstream.analysis.locate import locate_run
from rollstream.config.config import url_identity
from rollstream.config.identity import IDENTITY_KEY, mark_deleted, read_identity
from rollstream.errors import ConfigurationError, LeaseHeld
from rollstream.storage.archive.file_names import parse_archive_key
from rollstream.storage.checkpoints import stored_checkpoints
from rollstream.storage.leases import LeaseCandidate, acquire_lease, living_leases
from rollstream.storage.stores.base import ListedObject, ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.file import FileStore
from rollstream.storage.terms import read_role
from rollstream.storage.weights.anchors import lineage
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.pointer import POINTER_KEY, believed_pointer
from rollstream.streams.removal import LogContents, living_rollouts, log_contents, remove_log
from rollstream.streams.values import Version

Keep = Literal["archive", "final"]
KEEPS: tuple[Keep, ...] = ("archive", "final")
ROLES = ("trainer", "dispatch", "prompts", "archive")
STORE_ROOTS = (
    "archive", "weights", "model", "checkpoints", "pins", "roles", "dispatch", "blobs",
    "configurations", "audit", "probes", "run.json", "forked_from.json",
)  # fmt: skip
"""First parts of all keys of a run's store; other objects are not the run's."""
FOLDER_PARTS = (
    "metrics", "logs", "profiles", "report.html", "replay.json", "nonces.json",
    "token-scores.parquet", "model", "config.json",
)  # fmt: skip
"""Files and folders that programs write into a run's folder beside log and store, in the order of
deletion.
"""
SETTINGS_KEPT = ("token-scores.parquet", "model", "config.json")
"""Entries that stay in the folder while a part of the store is kept, because readers need them, and
scores cannot be computed again without the weights.
"""
HEARTBEATS_S = 10.0  # for which the topic `status` is watched for living rollouts and relays
PASSES_MAX = 5
"""The most rounds of listing and deleting a store's objects: a process that is ending may write an
object after a listing.
"""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Names a run and its parts: `folder`, and the URLs of log (`bus`) and `store`. Paths are
    absolute; None for a part that does not exist or is not to be deleted.
    """

    run: str
    folder: Path | None
    bus: str | None
    store: str | None


@dataclass(frozen=True, slots=True)
class ObjectsPlan:
    """Sorts a store's objects into those to `delete`, in this order, those that are `kept` because
    the user asked for it, and `foreign` ones, which are not the run's.
    """

    delete: tuple[ListedObject, ...]
    kept: tuple[ListedObject, ...]
    foreign: tuple[ListedObject, ...]


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """Lists everything that a removal deletes and keeps. It is false if there is nothing to
    delete.
    """

    place: RunPlace
    log: LogContents | None
    objects: ObjectsPlan
    files: tuple[Path, ...]
    """The files and folders to delete in the run's folder, in the order of deletion."""
    unknown: tuple[Path, ...]
    """The other entries of the folder, which stay."""

    def __bool__(self) -> bool:
        return bool(self.log or self.objects.delete or self.files)


def plan_objects(
    listed: Iterable[ListedObject], run: str, keep: Collection[Keep], final: Collection[str]
) -> ObjectsPlan:
    """Sort the listed objects of a run's store, without I/O. `keep` names what the user wants to
    keep: the archive, or the `final` state, which is in the folders `final` (`final_folders`).

    An object is foreign if no run writes such a key, if it belongs to a run whose store is inside
    this one (below a `run.json` of its own), or if it is an archive file of another run's name.
    With any `keep`, `run.json` stays: its mark of a deleted run keeps roles away.
    """
    entries = list(listed)
    nested = tuple(
        entry.key.removesuffix(IDENTITY_KEY)
        for entry in entries
        if entry.key.endswith(f"/{IDENTITY_KEY}")
    )
    delete: list[ListedObject] = []
    kept: list[ListedObject] = []
    foreign: list[ListedObject] = []
    for entry in entries:
        key = entry.key
        archived = parse_archive_key(key, entry.bytes)
        is_own = key.partition("/")[0] in STORE_ROOTS and not key.startswith(nested)
        if not is_own or (archived is not None and archived.run != run):
            foreign.append(entry)
        elif _is_kept(key, keep, final):
            kept.append(entry)
        else:
            delete.append(entry)
    return ObjectsPlan(tuple(sorted(delete, key=_deletion_order)), tuple(kept), tuple(foreign))


def _is_kept(key: str, keep: Collection[Keep], final: Collection[str]) -> bool:
    root = key.partition("/")[0]
    if root == "archive":
        return "archive" in keep
    if root in ("weights", "checkpoints"):
        return "final" in keep and (key == POINTER_KEY or key.startswith(tuple(final)))
    return bool(keep) and root in (IDENTITY_KEY, "model", "configurations", "forked_from.json")


def _deletion_order(entry: ListedObject) -> tuple[int, str]:
    """Returns the sort key of deletion. Manifests and the pointer are first, because readers ignore
    objects without a manifest, so none meets half a version. Leases and then `run.json` are last,
    because they keep roles away: a role that read `run.json` before it was marked reads it again
    after it took its lease, and ends.
    """
    key = entry.key
    if key.endswith("/manifest.json") or key == POINTER_KEY:
        return 0, key
    return (3 if key == IDENTITY_KEY else 2 if key.startswith("roles/") else 1), key


def final_folders(store: ObjectStore) -> tuple[str, ...]:
    """Returns the folders of the final state: that of the newest complete checkpoint, and those
    needed to read the believed version (`version_folders`).
    """
    whole = [stored.id for stored in stored_checkpoints(store) if stored.whole]
    folders = [f"{max(whole).folder}/"] if whole else []
    pointer = believed_pointer(store)
    return (*folders, *version_folders(store, pointer.version if pointer else None))


def version_folders(store: ObjectStore, version: Version | None) -> tuple[str, ...]:
    """Returns the folders needed to read `version`: its own, those of its parents back to the
    nearest anchor if it is a delta, and that of the base if it is an adapter. Raises
    `ObjectMissing` if a manifest is gone.
    """
    folders: list[str] = []
    if version is not None:
        for manifest in lineage(store, read_manifest(store, version)):
            folders.append(f"weights/{manifest.version}/")
            if manifest.kind == "adapter":
                folders.append(f"weights/{manifest.anchor}/")
            if manifest.kind != "delta":
                break
    return tuple(folders)


def plan_removal(place: RunPlace, keep: Collection[Keep]) -> RemovalPlan:
    """Plan the removal of what exists now of log, store and folder; delete nothing. Raises
    `LeaseHeld` if a consumer group has members.
    """
    log = None if place.bus is None else log_contents(place.bus)
    objects, store = ObjectsPlan((), (), ()), _opened(place.store)
    if store is not None:
        final = final_folders(store) if "final" in keep else ()
        objects = plan_objects(store.list(), place.run, keep, final)
    files, unknown = _folder_files(place, keep)
    return RemovalPlan(place, log, objects, files, unknown)


def _opened(store_url: str | None) -> ObjectStore | None:
    """Open the store; returns None for a folder that does not exist, because opening the store
    would create it.
    """
    folder = None if store_url is None else _folder_of(store_url)
    if store_url is None or (folder is not None and not folder.is_dir()):
        return None
    return open_store(store_url)


def _folder_of(store_url: str) -> Path | None:
    """Returns the folder of a `file:` store; None for other stores."""
    scheme, _, rest = store_url.partition(":")
    return Path(rest.removeprefix("//")).absolute() if scheme == "file" else None


def _folder_files(
    place: RunPlace, keep: Collection[Keep]
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    if place.folder is None or not place.folder.is_dir():
        return (), ()
    names = [name for name in FOLDER_PARTS if not (keep and name in SETTINGS_KEPT)]
    urls = [url.partition(":")[2] for url in (place.bus, place.store) if url is not None]
    known = {*FOLDER_PARTS, "run.lock", "replay.lock", *(Path(url).name for url in urls)}
    unknown = [path for path in sorted(place.folder.iterdir()) if path.name not in known]
    files = [path for name in names if (path := place.folder / name).exists()]
    return tuple(files), tuple(unknown)


def check_not_living(place: RunPlace, heartbeats_s: float = HEARTBEATS_S) -> None:
    """Raise `LeaseHeld` if a process of the run lives: if a lease is renewed, or a rollout or relay
    sends a status, while this function watches them. It watches for about the duration of a lease,
    then `heartbeats_s` seconds.
    """
    store = _opened(place.store)
    living = [] if store is None else living_leases(store, ROLES)
    if living:
        held = ", ".join(f"{one.role} (by {one.holder}, term {one.term})" for one in living)
        raise LeaseHeld(f"the run {place.run} is running: leases are held of {held}; stop it")
    if place.bus is not None and living_rollouts(place.bus, heartbeats_s):
        raise LeaseHeld(
            f"the run {place.run} is running: rollouts or relays report to {place.bus}; stop them"
        )


def remove(plan: RemovalPlan, keep: Collection[Keep]) -> Iterator[str]:
    """Delete everything that the plan lists, and objects of the run that appeared since; yields
    `log`, `store` and `folder`, each when its part is done. The caller has checked that no process
    of the run lives (`check_not_living`), and holds the folder's lock. Raises `LeaseHeld` before
    anything is deleted if a lease is renewed nevertheless.

    1. Mark the run in `run.json` as deleted. From here a role that starts, of any release, reads
       the mark and ends, and a running role ends within a minute. Without the mark a trainer that
       starts during 4 would find no checkpoint and publish version 0 into a store that is being
       emptied.
    2. Take and release the leases, so that a holder that was only suspended finds a higher term.
    3. Delete consumer groups and topics.
    4. Delete objects: manifests first, then others, then leases, `run.json` last.
    5. Delete the folder's files, `config.json` last, because a repeated command finds log and store
       by it.
    """
    place = plan.place
    store = _opened(place.store)
    if store is not None and (plan.objects.delete or plan.objects.kept):
        mark_deleted(store, place.run)  # 1
        _fence(store, place.run)  # 2
    if place.bus is not None and plan.log:
        remove_log(place.bus, plan.log)  # 3
        yield "log"
    if store is not None:
        _delete_objects(store, plan, keep)  # 4
        yield "store"
    if place.folder is not None and place.folder.is_dir():
        _delete_files(place.folder, plan.files, bool(keep))  # 5
        yield "folder"


def _fence(store: ObjectStore, run: str) -> None:
    """Take each lease, which fences a suspended holder by a higher term, and release it, so that a
    repeated removal need not wait. If a holder is alive, remove the mark and raise `LeaseHeld`.
    """
    for role in ROLES:
        present = read_role(store, role)
        if present is None:
            continue
        wait_s = 0.0 if present[0].released else 1.5 * present[0].duration_s
        try:
            acquire_lease(store, LeaseCandidate(role, "rm", token_hex(16)), wait_s).release()
        except LeaseHeld:
            mark_deleted(store, run, deleted=False)
            raise


def _delete_objects(store: ObjectStore, plan: RemovalPlan, keep: Collection[Keep]) -> None:
    """Delete the plan's objects, then those that appeared since; `PASSES_MAX` rounds at most."""
    kept = tuple(entry.key for entry in plan.objects.kept)
    due = plan.objects
    for _ in range(PASSES_MAX):
        if not due.delete:
            break
        for _, entries in groupby(due.delete, key=lambda entry: _deletion_order(entry)[0]):
            store.delete_all(entry.key for entry in entries)
        due = plan_objects(store.list(), plan.place.run, keep, kept)
    if isinstance(store, FileStore):
        store.remove_if_empty()


def _delete_files(folder: Path, files: Iterable[Path], is_kept: bool) -> None:
    for path in files:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if is_kept:
        return
    for name in ("replay.lock", "run.lock"):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _is_emptied(store_url: str, store: ObjectStore | None) -> bool:
    """Returns whether `store_url` can be the place of a run that was removed completely: the store
    has no object, or its folder is missing and the folder above exists. A mistyped prefix of an
    existing bucket cannot be told from it.
    """
    if store is not None:
        return next(store.list(), None) is None
    folder = _folder_of(store_url)
    return folder is not None and folder.parent.is_dir()


def find_run_place(named: str, bus: str | None = None, *, or_emptied: bool = False) -> RunPlace:
    """Locate the run that the user calls `named`: its folder, its config.json, or the URL of its
    store or its log. `bus` is the URL of the log of a run named by its store. Raises
    `ConfigurationError` if no run is there; with `or_emptied` an empty store is accepted as the
    place of a run that was removed.
    """
    scheme, separator, _ = named.partition(":")
    if separator and scheme in ("kafka", "sqlite"):
        if bus is not None:
            raise ConfigurationError(f"--bus {bus}: {named} is a log already; name the store first")
        return RunPlace(url_identity(named), None, named, None)
    if separator and not Path(named).exists():
        store = _opened(named)
        identity = None if store is None else read_identity(store)
        if identity is None and not (or_emptied and _is_emptied(named, store)):
            raise ConfigurationError(f"{named} holds no run (no {IDENTITY_KEY}); is the URL right?")
        run = url_identity(named) if identity is None else identity.run
        return RunPlace(run, None, bus, named)
    path = Path(named).absolute()
    folder = path.parent if path.name == "config.json" else path
    if bus is not None:
        raise ConfigurationError(f"--bus {bus}: {folder}/config.json names the run's log already")
    if not (folder / "config.json").is_file():
        if folder.is_dir() and {p.name for p in folder.iterdir()} == {"run.lock"}:
            return RunPlace(folder.name, folder, None, None)  # a removal that was nearly complete
        raise ConfigurationError(f"{folder} holds no run (no config.json there); is it right?")
    location = locate_run(str(folder))
    return RunPlace(location.run or folder.name, folder, location.bus, location.store)
