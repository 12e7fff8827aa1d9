"""Decides which weight versions to delete (`plan_retention`, a pure function), deletes them
(`delete_versions`), and lets readers pin versions that they still need (invariant 11).

A reader that is behind, for instance an evaluation, pins versions in the store (`VersionPins`);
the trainer reads all pins (`PinnedByReaders`) before it plans. All manifests are deleted before any
other file, those of the newest versions first. So after a crash no complete delta is left without
its base, and no partly deleted version counts as complete.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollstream.errors import CorruptObject, Fenced, ObjectMissing, StoreError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import decode_json, encode_json
from rollstream.storage.stores.run_keys import RunKeys, undecided
from rollstream.storage.weights.manifest import (
    RUN_KEYS as VERSION_KEYS,
    VERSION_FILES,
    manifest_key,
    parse_version,
    read_manifest,
    version_folder,
)
from rollstream.storage.weights.pointer import Pointer, read_pointer
from rollstream.streams.values import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Describes a version whose folder is in the store. A delta or adapter applies to `base`; an
    anchor has none. Without a manifest the version is not `whole` (complete).
    """

    version: Version
    base: Version | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Names the versions to delete, oldest first. `unpinned` are those of them that something still
    needs and that are deleted nevertheless, because the bound leaves no room for them.
    """

    delete: tuple[Version, ...]
    unpinned: tuple[Version, ...]


def plan_retention(
    versions: Sequence[StoredVersion],
    pointer: Pointer,
    pinned: Collection[Version],
    keep_every: int,
    versions_max: int,
    to_continue: Collection[Version] = (),
) -> RetentionPlan:
    """Plan to keep at most `versions_max` versions, the bases that they need included. `pinned` are
    the versions that rollouts, open partials and other readers still need; `to_continue` are those
    without which no trainer can continue from a kept checkpoint.

    Versions that are being published always stay: those of a higher term than the pointer's, and
    those of its own term with a number above the believed one. Then, until the bound is reached,
    these stay in this order: the believed version (always), the newest other one (its fetch may be
    under way), those in `to_continue`, pinned ones, multiples of `keep_every` (0: none), the rest.
    Each kind goes newest first, so the oldest pinned versions are given up first: their
    trajectories start again on the newest version. Without one in `to_continue` no trainer could
    resume: a slow rollout that held 7 while 10 was published with `versions_max` 4 had 5 deleted,
    the reference version of the checkpoint of step 7.

    All others are deleted, whatever the bound: versions that lack their manifest or a base, and,
    unless needed, versions of lower terms with a number above the believed one, because they will
    never be believed.
    """
    whole = {stored.version: stored for stored in versions if stored.whole}
    coming = [stored.version for stored in versions if _is_coming(stored.version, pointer)]
    readable = {version for version in whole if _is_readable(version, whole)}
    needed = {*pinned, *to_continue}
    wanted = {v for v in readable if v in needed or not _is_above(v, pointer)}
    candidates = sorted(wanted.union(coming, whole.keys() & {pointer.version}), reverse=True)
    kept = set(coming).union(*(_chain(version, whole) for version in coming))
    for version in _by_importance(candidates, pointer, (to_continue, pinned), keep_every):
        chain = {version} | _chain(version, whole)
        if len(kept | chain) > versions_max and version != pointer.version:
            break
        kept |= chain
    delete = sorted(stored.version for stored in versions if stored.version not in kept)
    unpinned = (version for version in delete if version in needed and version in candidates)
    return RetentionPlan(tuple(delete), tuple(unpinned))


def _is_readable(version: Version, whole: dict[Version, StoredVersion]) -> bool:
    """Returns whether all bases of the version exist, down to its anchor."""
    return all(whole[v].base is None or whole[v].base in whole for v in _chain(version, whole))


def _is_above(version: Version, pointer: Pointer) -> bool:
    return pointer.version is None or version.number > pointer.version.number


def _is_coming(version: Version, pointer: Pointer) -> bool:
    own = version.term == pointer.term
    return version.term > pointer.term or (own and _is_above(version, pointer))


def _by_importance(
    newest_first: Sequence[Version],
    pointer: Pointer,
    needed: Sequence[Collection[Version]],
    keep_every: int,
) -> list[Version]:
    believed = [version for version in newest_first if version == pointer.version]
    before = [version for version in newest_first if version not in believed][:1]
    held = [version for kind in needed for version in newest_first if version in kind]
    multiples = [
        version for version in newest_first if keep_every and version.number % keep_every == 0
    ]
    return list(dict.fromkeys([*believed, *before, *held, *multiples, *newest_first]))


def _chain(version: Version, stored: dict[Version, StoredVersion]) -> set[Version]:
    """Returns the version and all bases below it, down to its anchor."""
    chain: set[Version] = set()
    step: Version | None = version
    while step is not None and step in stored and step not in chain:
        chain.add(step)
        step = stored[step].base
    return chain


def listed_versions(store: ObjectStore) -> list[Version]:
    """Returns the versions of which any object is in the store, oldest first. A file of another
    program in a version's folder is no object of it.
    """
    keys = (entry.key for entry in store.list("weights/"))
    folders = {key.split("/")[1] for key in keys if any(one.owns(key) for one in VERSION_KEYS)}
    return [version for name in sorted(folders) if (version := parse_version(name)) is not None]


def stored_versions(
    store: ObjectStore, known: Collection[StoredVersion] = ()
) -> list[StoredVersion]:
    """Returns the versions in the store, oldest first. It lists the store and reads a manifest per
    version, so only the trainer, evaluation and commands that show versions call it; a rollout
    follows announcements.

    A complete version never changes, so the manifests of `known` versions are not read again.
    """
    whole = {stored.version: stored for stored in known if stored.whole}
    return [whole.get(version) or _stored(store, version) for version in listed_versions(store)]


def is_whole(store: ObjectStore, version: Version) -> bool:
    """Returns whether the version is complete. It reads one manifest."""
    return _stored(store, version).whole


def _stored(store: ObjectStore, version: Version) -> StoredVersion:
    try:
        manifest = read_manifest(store, version)
    except ObjectMissing:
        return StoredVersion(version, whole=False)
    except CorruptObject:
        return StoredVersion(version)  # kept as a complete one: damage is no reason to delete it
    return StoredVersion(version, manifest.base)


def delete_versions(store: ObjectStore, plan: RetentionPlan, term: int) -> None:
    """Delete the versions of the plan: their manifests, newest first, then all other files of
    theirs. A file of another user in a version's folder stays.

    Idempotent, also after an interruption. Raises `Fenced` once a trainer of a higher term than
    `term` owns the pointer.
    """
    folders = [f"{version_folder(version)}/" for version in plan.delete]
    listed = [entry.key for folder in folders for entry in store.list(folder)]
    names = _names_of(store, listed)  # before the manifests are deleted
    for version in reversed(plan.delete):
        _check_deletable(store, version, term)
        store.delete(manifest_key(version))
    files = [key for key in listed if VERSION_FILES.owns(key, names)]
    if files:
        _check_deletable(store, plan.delete[0], term)
        store.delete_all(files)


def _names_of(store: ObjectStore, listed: Collection[str]) -> frozenset[str]:
    """Returns the names of the model's files that the versions' manifests name, if the listing has
    such files that only a manifest tells from a user's.
    """
    names: set[str] = set()
    for folder in {key.rpartition("/")[0] for key in undecided((VERSION_FILES,), listed)}:
        version = parse_version(folder.removeprefix("weights/"))
        with suppress(ObjectMissing, CorruptObject):
            if version is not None:
                manifest = read_manifest(store, version)
                names |= {file.name for file in (*manifest.files, *manifest.model_files)}
    return frozenset(names)


def _check_deletable(store: ObjectStore, version: Version, term: int) -> None:
    present = read_pointer(store)
    if present is not None and present[0].term > term:
        raise Fenced(f"a trainer of term {present[0].term} decides what stays, not {term}")
    assert present is None or present[0].version != version, "the believed version must stay"


PIN_PREFIX = "pins/"
PINS = RunKeys(re.compile(rf"{PIN_PREFIX}[^/]+\.json"), "cut")
RUN_KEYS = (PINS,)
PIN_EVERY_S = 10.0
PIN_LIVE_S = 60.0  # a pin that is not renewed ends after this time on the trainer's own clock
PINNED_MAX = 4  # most versions that one reader can pin


@dataclass(frozen=True, slots=True)
class PinRecord:
    """Names the versions that one reader has pinned; `renewals` is another number after each
    renewal, so an unchanged record shows that its reader is dead.
    """

    name: str
    versions: tuple[Version, ...]
    renewals: int


class VersionPins:
    """Pins versions for the reader `name`, in the object `pins/<name>.json`: retention prefers them
    to others, within `versions_max`, until `close`. A thread renews the pins every `every_s`
    seconds; `close` ends the thread and removes the pins.
    """

    def __init__(self, store: ObjectStore, name: str, every_s: float = PIN_EVERY_S) -> None:
        self._store, self._name, self._every_s = store, name, every_s
        self._key = f"{PIN_PREFIX}{name}.json"
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._versions: tuple[Version, ...] = ()
        self._renewals = secrets.randbits(48)  # a restarted reader's numbers differ from these
        self._thread = threading.Thread(target=self._run, name="pins", daemon=True)
        self._thread.start()

    def set(self, versions: Sequence[Version]) -> None:
        """Pin the first `PINNED_MAX` of these versions, in place of those pinned before."""
        with self._lock:
            wanted = tuple(versions[:PINNED_MAX])
            if wanted != self._versions:
                self._versions = wanted
                self._write()

    def close(self) -> None:
        """End the renewals and remove the pins."""
        self._stop.set()
        self._thread.join()
        self.set(())

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                try:
                    self._write()
                except StoreError as error:  # the next renewal may succeed
                    log.warning("the pins of %s are not renewed: %s", self._name, error)

    def _write(self) -> None:
        self._renewals += 1
        if self._versions:
            record = PinRecord(self._name, self._versions, self._renewals)
            self._store.put(self._key, encode_json(record))
        else:
            self._store.delete(self._key)


class PinnedByReaders:
    """Returns, at each call, the versions that living readers have pinned. A pin counts until its
    record has stayed unchanged for `PIN_LIVE_S` on the caller's clock, so pins of a killed reader
    end by themselves.
    """

    def __init__(self, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store, self._monotonic = store, monotonic
        self._seen: dict[str, tuple[PinRecord, float]] = {}

    def __call__(self) -> set[Version]:
        now_s, found = self._monotonic(), dict[str, tuple[PinRecord, float]]()
        for entry in self._store.list(PIN_PREFIX):
            try:
                record = decode_json(self._store.get(entry.key), PinRecord, entry.key)
            except ObjectMissing:
                continue
            except CorruptObject as error:
                log.warning("%s pins nothing: %s", entry.key, error)
                continue
            earlier = self._seen.get(entry.key)
            found[entry.key] = earlier if earlier and earlier[0] == record else (record, now_s)
        self._seen = found
        return {
            version
            for record, since_s in found.values()
            if now_s - since_s < PIN_LIVE_S
            for version in record.versions[:PINNED_MAX]
        }
