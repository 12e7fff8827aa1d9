"""Which versions to delete, their deletion, and pins of readers that are behind, for instance an
evaluation (invariant 11).
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollstream.errors import CorruptObject, ObjectMissing, StoreError
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
from rollstream.storage.weights.pointer import Pointer, check_term
from rollstream.streams.values import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A delta or adapter applies to `base`; without a manifest the version is not `whole`."""

    version: Version
    base: Version | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The versions to delete, oldest first; `unpinned` are those still needed, for which the bound
    leaves no room.
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
    """Plans within `versions_max`. `pinned` are those that rollouts, open partials and other
    readers need; `to_continue` those without which no trainer continues from a kept checkpoint.

    Versions that are being published stay: of a higher term than the pointer's, or of its term
    above the believed number. Then stay, up to the bound: the believed version (always), the newest
    other one, `to_continue`, pinned ones, multiples of `keep_every` (0: none), the rest; each kind
    newest first, so trajectories of the oldest pinned versions start again on the newest one.

    All others are deleted: versions without manifest or base, and, unless needed, those of lower
    terms above the believed number, which will never be believed.
    """
    complete = {stored.version: stored for stored in versions if stored.whole}
    coming = [stored.version for stored in versions if _is_coming(stored.version, pointer)]
    readable = {version for version in complete if _is_readable(version, complete)}
    needed = {*pinned, *to_continue}
    eligible = {v for v in readable if v in needed or not _is_above(v, pointer)}
    candidates = sorted(eligible.union(coming, complete.keys() & {pointer.version}), reverse=True)
    retained = set(coming).union(*(_chain(version, complete) for version in coming))
    # `to_continue` precedes pins: a slow rollout that held 7 while 10 was published with
    # `versions_max` 4 had 5 deleted, the reference version of the checkpoint of step 7, and no
    # trainer could resume.
    for version in _by_importance(candidates, pointer, (to_continue, pinned), keep_every):
        chain = {version} | _chain(version, complete)
        if len(retained | chain) > versions_max and version != pointer.version:
            break
        retained |= chain
    delete = sorted(stored.version for stored in versions if stored.version not in retained)
    unpinned = (version for version in delete if version in needed and version in candidates)
    return RetentionPlan(tuple(delete), tuple(unpinned))


def _is_readable(version: Version, complete: dict[Version, StoredVersion]) -> bool:
    return all(
        complete[v].base is None or complete[v].base in complete for v in _chain(version, complete)
    )


def _is_above(version: Version, pointer: Pointer) -> bool:
    return pointer.version is None or version.number > pointer.version.number


def _is_coming(version: Version, pointer: Pointer) -> bool:
    is_own_term = version.term == pointer.term
    return version.term > pointer.term or (is_own_term and _is_above(version, pointer))


def _by_importance(
    newest_first: Sequence[Version],
    pointer: Pointer,
    needed: Sequence[Collection[Version]],
    keep_every: int,
) -> list[Version]:
    believed = [version for version in newest_first if version == pointer.version]
    # Its fetch may be under way.
    before = [version for version in newest_first if version not in believed][:1]
    needed_versions = [version for kind in needed for version in newest_first if version in kind]
    multiples = [
        version for version in newest_first if keep_every and version.number % keep_every == 0
    ]
    return list(dict.fromkeys([*believed, *before, *needed_versions, *multiples, *newest_first]))


def _chain(version: Version, stored: dict[Version, StoredVersion]) -> set[Version]:
    chain: set[Version] = set()
    step: Version | None = version
    while step is not None and step in stored and step not in chain:
        chain.add(step)
        step = stored[step].base
    return chain


def listed_versions(store: ObjectStore) -> list[Version]:
    """Returns versions with any object, oldest first; files of other programs do not count."""
    keys = (entry.key for entry in store.list("weights/"))
    folders = {
        key.split("/")[1] for key in keys if any(run_keys.owns(key) for run_keys in VERSION_KEYS)
    }
    return [version for name in sorted(folders) if (version := parse_version(name)) is not None]


def stored_versions(
    store: ObjectStore, previous: Collection[StoredVersion] = ()
) -> list[StoredVersion]:
    """Returns the versions, oldest first. It reads a listing and a manifest per version, too much
    for a rollout, which follows announcements; complete `previous` versions, which never change,
    are not read again.
    """
    complete = {stored.version: stored for stored in previous if stored.whole}
    return [complete.get(version) or _stored(store, version) for version in listed_versions(store)]


def is_whole(store: ObjectStore, version: Version) -> bool:
    """Returns whether the version is complete; reads one manifest."""
    return _stored(store, version).whole


def _stored(store: ObjectStore, version: Version) -> StoredVersion:
    try:
        manifest = read_manifest(store, version)
    except ObjectMissing:
        return StoredVersion(version, whole=False)
    except CorruptObject:
        # Kept as a complete one: damage is no reason to delete it.
        return StoredVersion(version)
    return StoredVersion(version, manifest.base)


def delete_versions(store: ObjectStore, plan: RetentionPlan, term: int) -> None:
    """Deletes the plan's versions; files of others in their folders stay. Idempotent, also after an
    interruption. Raises `Fenced` once a trainer of a term above `term` owns the pointer.
    """
    folders = [f"{version_folder(version)}/" for version in plan.delete]
    listed = [entry.key for folder in folders for entry in store.list(folder)]
    # Before the manifests are deleted.
    names = _names_of(store, listed)
    # All manifests go first, the newest before the others: after a crash no complete delta lacks
    # its base, and no partly deleted version counts as complete.
    for version in reversed(plan.delete):
        _check_deletable(store, version, term)
        store.delete(manifest_key(version))
    files = [key for key in listed if VERSION_FILES.owns(key, names)]
    if files:
        _check_deletable(store, plan.delete[0], term)
        store.delete_all(files)


def _names_of(store: ObjectStore, listed: Collection[str]) -> frozenset[str]:
    names: set[str] = set()
    # Only a manifest distinguishes these files of the model from a user's.
    for folder in {key.rpartition("/")[0] for key in undecided((VERSION_FILES,), listed)}:
        version = parse_version(folder.removeprefix("weights/"))
        with suppress(ObjectMissing, CorruptObject):
            if version is not None:
                manifest = read_manifest(store, version)
                names |= {file.name for file in (*manifest.files, *manifest.model_files)}
    return frozenset(names)


def _check_deletable(store: ObjectStore, version: Version, term: int) -> None:
    pointer = check_term(store, term)
    assert pointer is None or pointer.version != version, "the believed version must stay"


PIN_PREFIX = "pins/"
PINS = RunKeys(re.compile(rf"{PIN_PREFIX}[^/]+\.json"), "cut")
RUN_KEYS = (PINS,)
PIN_EVERY_S = 10.0
PIN_LIVE_S = 60.0  # a pin that is not renewed ends after this time on the trainer's own clock
PINNED_MAX = 4  # most versions that one reader can pin


@dataclass(frozen=True, slots=True)
class PinRecord:
    """`renewals` changes with each renewal, so an unchanged record shows that its reader is
    dead.
    """

    name: str
    versions: tuple[Version, ...]
    renewals: int


class VersionPins:
    """Pins in `pins/<name>.json`, renewed every `every_s` seconds until `close`: retention prefers
    them, within `versions_max`.
    """

    def __init__(self, store: ObjectStore, name: str, every_s: float = PIN_EVERY_S) -> None:
        self._store, self._name, self._every_s = store, name, every_s
        self._key = f"{PIN_PREFIX}{name}.json"
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._versions: tuple[Version, ...] = ()
        # A restarted reader's numbers differ from these.
        self._renewals = secrets.randbits(48)
        self._thread = threading.Thread(target=self._run, name="pins", daemon=True)
        self._thread.start()

    def set(self, versions: Sequence[Version]) -> None:
        with self._lock:
            pins = tuple(versions[:PINNED_MAX])
            if pins != self._versions:
                self._versions = pins
                self._write()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.set(())

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                try:
                    self._write()
                except StoreError as error:
                    # The next renewal may succeed.
                    log.warning("the pins of %s are not renewed: %s", self._name, error)

    def _write(self) -> None:
        self._renewals += 1
        if self._versions:
            record = PinRecord(self._name, self._versions, self._renewals)
            self._store.put(self._key, encode_json(record))
        else:
            self._store.delete(self._key)


class PinnedByReaders:
    """A pin ends once its record is unchanged for `PIN_LIVE_S` on the caller's clock, as after a
    reader was killed.
    """

    def __init__(self, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store, self._monotonic = store, monotonic
        self._seen: dict[str, tuple[PinRecord, float]] = {}

    def __call__(self) -> set[Version]:
        now_s, pins = self._monotonic(), dict[str, tuple[PinRecord, float]]()
        for entry in self._store.list(PIN_PREFIX):
            try:
                record = decode_json(self._store.get(entry.key), PinRecord, entry.key)
            except ObjectMissing:
                continue
            except CorruptObject as error:
                log.warning("%s pins nothing: %s", entry.key, error)
                continue
            earlier = self._seen.get(entry.key)
            pins[entry.key] = earlier if earlier and earlier[0] == record else (record, now_s)
        self._seen = pins
        return {
            version
            for record, since_s in pins.values()
            if now_s - since_s < PIN_LIVE_S
            for version in record.versions[:PINNED_MAX]
        }
