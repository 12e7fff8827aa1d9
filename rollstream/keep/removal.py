"""Deletes a run: consumer groups, topics, objects and folder, and nothing of another run or of the
user. The same request, after an interruption at any point, deletes the rest.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Literal

from rollstream.errors import LeaseHeld
from rollstream.keep.folder_files import FolderFiles, delete_files, folder_files
from rollstream.keep.links import (
    FolderLink,
    listed_objects,
    remove_empty_folders,
    remove_link,
    store_links,
)
from rollstream.keep.own import manifest_names, sort_objects
from rollstream.keep.run_place import (
    RunPlace,
    RunProof,
    find_run_place,
    open_present,
    open_present_for_reading,
    prove_run,
    write_removal,
)
from rollstream.look.query.permissions import folder_of_url
from rollstream.run.config.run_files import CONFIGURATION_FILE, LOCKS, REMOVAL_FILE
from rollstream.storage.identity import mark_deleted
from rollstream.storage.leases import LeaseCandidate, acquire_lease
from rollstream.storage.living_leases import living_leases
from rollstream.storage.stores.base import ListedObject, ObjectStore
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.storage.terms import SINGLE_HOLDERS, read_role
from rollstream.storage.weights.anchors import lineage
from rollstream.storage.weights.checkpoints import stored_checkpoints
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.named_streams import WeightStream, run_streams
from rollstream.storage.weights.pointer import POINTER_KEY, believed_pointer
from rollstream.streams.removal import (
    LogContents,
    living_rollouts,
    log_contents,
    remove_empty_folder,
    remove_log,
)
from rollstream.streams.values import Version

__all__ = ["RunPlace", "find_run_place"]

Keep = Literal["archive", "final"]
KEEPS: tuple[Keep, ...] = ("archive", "final")
LEASE_WAIT_S = 300.0  # the longest wait for a holder; leases of this program last below a minute
HEARTBEATS_S = 10.0  # for which the topic `status` is watched for living rollouts and relays
PASSES_MAX = 5
"""Rounds of listing and deleting: a process that is ending may write an object after a listing."""


@dataclass(frozen=True, slots=True)
class ObjectsPlan:
    """A store's objects: those to `delete`, in this order, those that the user keeps (`kept`), and
    `foreign` ones, which are not the run's.
    """

    delete: tuple[ListedObject, ...]
    kept: tuple[ListedObject, ...]
    foreign: tuple[ListedObject, ...]
    orders: tuple[int, ...] = ()
    """By object to delete (`run_keys`); ascending."""

    def groups(self) -> Iterator[list[str]]:
        pairs = zip(self.orders, self.delete, strict=True)
        for _, group in groupby(pairs, key=lambda pair: pair[0]):
            yield [entry.key for _, entry in group]


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """False if there is nothing to delete."""

    place: RunPlace
    log: LogContents | None
    objects: ObjectsPlan
    folder: FolderFiles
    links: tuple[FolderLink, ...]
    """In the place of a folder of the run's objects."""
    proof: RunProof

    def __bool__(self) -> bool:
        return bool(self.log or self.objects.delete or self.folder or self.links)


def plan_objects(
    listed: Iterable[ListedObject],
    run: str,
    keep: Collection[Keep],
    final: Collection[str],
    names: Collection[str] = (),
) -> ObjectsPlan:
    """Plans the objects without I/O. `keep` names the kept parts: the archive, or the `final`
    state, whose keys begin as one of `final` (`final_state`).
    """
    own_objects, foreign = sort_objects(listed, run, names)
    delete: list[tuple[int, ListedObject]] = []
    kept_objects: list[ListedObject] = []
    for entry, keys in own_objects:
        # With any `keep`, `run.json` stays: its mark of a deleted run keeps roles away.
        if _is_kept(entry.key, keys, keep, final):
            kept_objects.append(entry)
        else:
            delete.append((keys.deletion, entry))
    delete.sort(key=lambda due: (due[0], due[1].key))
    return ObjectsPlan(
        tuple(entry for _, entry in delete),
        tuple(kept_objects),
        tuple(foreign),
        tuple(order for order, _ in delete),
    )


def _is_kept(key: str, keys: RunKeys, keep: Collection[Keep], final: Collection[str]) -> bool:
    if keys.kept == "final":
        return "final" in keep and key.startswith(tuple(final))
    return bool(keep) if keys.kept == "any" else keys.kept in keep


def final_state(store: ObjectStore) -> tuple[str, ...]:
    """The folder of the newest complete checkpoint, and of each weight stream the pointer and the
    folders of the believed version.
    """
    checkpoints = [stored.id for stored in stored_checkpoints(store) if stored.whole]
    keys = [f"{max(checkpoints).folder}/"] if checkpoints else []
    for stream in run_streams(store):
        pointer = believed_pointer(stream.part(store))
        keys += [stream.prefix + POINTER_KEY]
        keys += version_folders(store, stream, pointer.version if pointer else None)
    return tuple(keys)


def version_folders(
    store: ObjectStore, stream: WeightStream, version: Version | None
) -> tuple[str, ...]:
    """The folders that are needed to read a `version`: its own, its parents' back to the nearest
    anchor for a delta, the base's for an adapter. Raises `ObjectMissing` if a manifest is gone.
    """
    folders: list[str] = []
    if version is not None:
        part = stream.part(store)
        for manifest in lineage(part, read_manifest(part, version)):
            folders.append(f"weights/{manifest.version}/")
            if manifest.kind == "adapter":
                folders.append(f"weights/{manifest.anchor}/")
            if manifest.kind != "delta":
                break
    return tuple(stream.prefix + folder for folder in folders)


def plan_removal(place: RunPlace, keep: Collection[Keep]) -> RemovalPlan:
    """Plans the removal of log, store and folder as they are now. Raises `ConfigurationError` if
    nothing proves that they are a run's (`prove_run`), `LeaseHeld` if a consumer group has members.
    """
    log = None if place.bus is None else log_contents(place.bus)
    proof = prove_run(place, open_present_for_reading(place.store), log)
    store = open_present(place.store)
    objects, names, links = ObjectsPlan((), (), ()), frozenset[str](), tuple[FolderLink, ...]()
    if store is not None:
        links = store_links(store, proof.id) if proof.in_store else ()
        listed = listed_objects(store, links)
        names = manifest_names(store, listed)
        final = final_state(store) if "final" in keep else ()
        objects = plan_objects(listed, place.run, keep, final, names)
        if not proof.in_store:
            objects = ObjectsPlan((), (), tuple(listed))
        links = tuple(link for link in links if not _has_kept(link, objects))
    beside = [folder_of_url(url) for url in (place.bus, place.store) if url is not None]
    folder = place.folder if proof.in_folder else None
    files = folder_files(folder, bool(keep), names, [path for path in beside if path])
    return RemovalPlan(place, log, objects, files, links, proof)


def check_is_run(place: RunPlace) -> None:
    log = None if place.bus is None else log_contents(place.bus)
    prove_run(place, open_present_for_reading(place.store), log)


def _has_kept(link: FolderLink, objects: ObjectsPlan) -> bool:
    # The link must stay for a kept object behind it.
    return any(entry.key.startswith(link.prefix) for entry in objects.kept)


def check_not_living(place: RunPlace, heartbeats_s: float = HEARTBEATS_S) -> None:
    """Raises `LeaseHeld` if a lease is renewed, or a rollout or relay sends a status, within about
    the duration of a lease, then `heartbeats_s` seconds; or if a lease is too long for that.
    """
    store = open_present(place.store)
    living = [] if store is None else living_leases(store, SINGLE_HOLDERS, LEASE_WAIT_S)
    if living:
        leases = ", ".join(
            f"{lease.role} (by {lease.holder}, term {lease.term})" for lease in living
        )
        raise LeaseHeld(f"the run {place.run} is running: leases are held of {leases}; stop it")
    if place.bus is not None and living_rollouts(place.bus, heartbeats_s):
        raise LeaseHeld(
            f"the run {place.run} is running: rollouts or relays report to {place.bus}; stop them"
        )


def remove(plan: RemovalPlan, keep: Collection[Keep]) -> Iterator[str]:
    """Delete everything that the plan lists, and objects of the run that appeared since; yields
    `log`, `store` and `folder`, each when its part is done. The caller has called
    `check_not_living` and holds the folder's lock. Raises `LeaseHeld`, with nothing deleted, if a
    lease is renewed nevertheless.

    1. Mark the run in `run.json` as deleted, and write the run's id into the folder.
    2. Take and release the leases, so that a suspended holder finds a higher term.
    3. Delete consumer groups and topics.
    4. Delete objects: manifests first, then others, then leases, `run.json` last.
    5. Delete the folder's files, `config.json` after all but the id.
    """
    place = plan.place
    store = open_present(place.store)
    folder = None if place.folder is None or not place.folder.is_dir() else place.folder
    if folder is not None and plan:
        # The id proves after 5 that the rest is the run's.
        write_removal(folder, place.run, plan.proof.id)  # 1
    if store is not None and (plan.objects.delete or plan.objects.kept):
        # From here a role that starts, of any release, reads the mark and ends; a running one ends
        # within a minute. Without it a trainer that starts during 4 would publish version 0 into
        # the store.
        mark_deleted(store, place.run)
        _fence(store, place.run)  # 2
    if place.bus is not None and plan.log:
        remove_log(place.bus, plan.log)  # 3
        yield "log"
    if store is not None:
        _delete_objects(store, plan, keep)  # 4
        yield "store"
    if folder is not None:
        # A repeated command finds log and store by `config.json`.
        _delete_folder(folder, plan.folder, bool(keep))  # 5
        yield "folder"


def _fence(store: ObjectStore, run: str) -> None:
    for role in SINGLE_HOLDERS:
        present = read_role(store, role)
        if present is None:
            continue
        # A lease of another program may state years.
        wait_s = 0.0 if present[0].released else min(1.5 * present[0].duration_s, LEASE_WAIT_S)
        try:
            # Released, so that a repeated removal need not wait.
            acquire_lease(store, LeaseCandidate(role, "rm", token_hex(16)), wait_s).release()
        except LeaseHeld:
            mark_deleted(store, run, deleted=False)
            raise


def _delete_objects(store: ObjectStore, plan: RemovalPlan, keep: Collection[Keep]) -> None:
    kept_keys = tuple(entry.key for entry in plan.objects.kept)
    names = frozenset(entry.key.rpartition("/")[2] for entry in plan.objects.delete)
    due = plan.objects
    for _ in range(PASSES_MAX):
        if not due.delete:
            break
        for keys in due.groups():
            store.delete_all(keys)
        due = plan_objects(
            listed_objects(store, plan.links), plan.place.run, keep, kept_keys, names
        )
    for link in reversed(plan.links):  # a link behind another link first
        remove_link(link)
    root = folder_of_url(plan.place.store or "")
    if isinstance(store, FileStore) and root is not None:
        for top in {link.prefix.partition("/")[0] for link in plan.links}:
            remove_empty_folders(root / top)
        store.remove_if_empty()
        if not plan.objects.kept:
            _remove_own_folders(root)
        if root.is_symlink() and next(store.list(), None) is None:
            remove_link(FolderLink(root, root.resolve(), "", True))


def _remove_own_folders(root: Path) -> None:
    # Locks of a file store in which only objects of others are left.
    for path in (root / "~locks").glob("[0-9a-f][0-9a-f]"):
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)
    for name in ("~locks", "~writing"):
        remove_empty_folders(root / name)


def _delete_folder(folder: Path, files: FolderFiles, is_kept: bool) -> None:
    delete_files(folder, files)
    last = (REMOVAL_FILE,) if is_kept else (CONFIGURATION_FILE, REMOVAL_FILE, *LOCKS)
    for name in last:
        (folder / name).unlink(missing_ok=True)
    if not is_kept and not any(folder.iterdir()):
        remove_empty_folder(folder)
