"""The objects of weight versions in a relay. One is *offered* to the node's rollouts, under its
file name, once all its bytes match its hash and its version's manifest names that hash. Other
relays get bytes as they arrive, and verify them themselves.
"""

import logging
import shutil
import threading
from collections import Counter
from pathlib import Path

from rollstream.errors import CorruptObject, NewerRelease
from rollstream.storage.relay.object import (
    MANIFEST,
    CachedObject,
    ObjectOffer,
    file_name_of,
    version_of,
)
from rollstream.storage.relay.topology import CachedVersion, versions_to_keep
from rollstream.storage.stores.json_objects import decode_json
from rollstream.storage.weights.manifest import FileEntry, Manifest, manifest_key, version_folder
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

ANNOUNCED_MAX = 256
INCOMING = ("relay_received_bytes_total", "relay_pushed_bytes_total", "relay_bucket_bytes_total")
AHEAD_MAX = 4
"""How far a pushed version's number may exceed the newest announced one: one is in training, two
wait to be published and one is being uploaded.
"""
STALLED_OBJECT_S = 30.0  # when the relay or trainer that sends dies, another resumes far sooner
OBJECTS_MAX = 4096  # of one version, which allows 4 GiB in files of 1 MiB


class RelayCache:
    """The newest `versions_max` versions and the bases of their deltas, within `bytes_max` bytes.
    Any client can push a false version, which after the first announcement only takes free room for
    a while.
    """

    def __init__(self, folder: Path, versions_max: int, bytes_max: int) -> None:
        self.folder = folder
        self._versions_max, self.bytes_max = versions_max, bytes_max
        self._changed = threading.Condition(threading.RLock())
        self._objects: dict[str, CachedObject] = {}
        self._offered: set[str] = set()
        self._manifests: dict[Version, Manifest] = {}
        self._announced: dict[Version, str] = {}
        self._progress: dict[str, tuple[int, float]] = {}  # arriving bytes by key, and since when
        self._opened = 0  # highest term that a trainer opened
        self._serial = 0  # names the newest file in `receiving`
        self.fence = 0
        """Highest term of a trainer that announced a version."""
        self.count = 0
        """Number of changes so far; a listing waits for a newer number."""
        self.counters: Counter[str] = Counter()
        for leftover in ("weights", "receiving"):
            shutil.rmtree(folder / leftover, ignore_errors=True)
        (folder / "receiving").mkdir(parents=True)

    # ---- content ---------------------------------------------------------------------------------

    def find(self, key: str) -> CachedObject | None:
        with self._changed:
            return self._objects.get(key)

    def objects(self) -> list[CachedObject]:
        with self._changed:
            return list(self._objects.values())

    def offers(self, after: int, wait_s: float) -> tuple[int, list[ObjectOffer]]:
        """Returns the number of changes and all objects, once the number differs from `after`, at
        most after `wait_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.count != after, wait_s)
            objects = self._objects.values()
            return self.count, [
                ObjectOffer(o.key, o.offer.bytes, o.offer.hash, o.verified) for o in objects
            ]

    def manifest(self, version: Version) -> Manifest | None:
        with self._changed:
            return self._manifests.get(version)

    def announced(self) -> dict[Version, str]:
        with self._changed:
            return dict(self._announced)

    def versions(self) -> list[Version]:
        with self._changed:
            return sorted(v for v in self._manifests if not self._missing(v))

    def missing(self, version: Version) -> list[ObjectOffer]:
        """Returns what the version's manifest names and is not offered; [] without a manifest."""
        with self._changed:
            return self._missing(version)

    def bytes(self) -> int:
        with self._changed:
            return sum(cached.offer.bytes for cached in self._objects.values())

    def is_expected(self, key: str) -> bool:
        """Returns whether the object may come, so that a reader should wait for it."""
        with self._changed:
            return self._is_expected(key, version_of(key))

    def wait_offered(self, key: str, wait_s: float) -> CachedObject | None:
        """Returns None after `wait_s` or if the object is not expected."""
        version = version_of(key)
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._offered or not self._is_expected(key, version), wait_s
            )
            return self._objects.get(key) if key in self._offered else None

    def bytes_received(self) -> int:
        with self._changed:
            return sum(self.counters[figure] for figure in INCOMING)

    # ---- changes ---------------------------------------------------------------------------------

    def wants(self, offer: ObjectOffer) -> bool:
        """Returns whether the version is plausible, and neither manifest nor announcement names
        other content.
        """
        version = version_of(offer.key)
        with self._changed:
            if version is None or not offer.is_sound or offer.bytes > self.bytes_max:
                return False
            if not self._is_plausible(version):
                return False
            if file_name_of(offer.key) == MANIFEST:
                return self._announced.get(version, offer.hash) == offer.hash
            entry = self._entry(version, file_name_of(offer.key))
            has_manifest = version in self._manifests
            return not has_manifest or (entry is not None and _offer(version, entry).is_same(offer))

    def wants_push(self, offer: ObjectOffer) -> bool:
        """As `wants`, without versions that are neither announced nor newer than all announced
        ones.
        """
        version = version_of(offer.key)
        with self._changed:
            is_new = not self._announced or version in self._announced or self._is_ahead(version)
            return is_new and self.wants(offer)

    def accept(self, offer: ObjectOffer) -> CachedObject | None:
        """Returns the object to write this content to; older versions are evicted. None if it is
        not wanted, or there is no room.
        """
        version = version_of(offer.key)
        with self._changed:
            present = self._objects.get(offer.key)
            if present is not None and present.offer.is_same(offer):
                return present
            if version is None or not self.wants(offer) or not self._make_room(version, offer):
                return None
            if present is not None:
                log.warning("object %s: other content was started before; dropped", offer.key)
                self._drop(offer.key)
            self._serial += 1
            cached = CachedObject(self.folder / "receiving" / f"{self._serial:08d}", offer)
            self._objects[offer.key] = cached
            self._notify()
            return cached

    def completed(self, cached: CachedObject) -> None:
        """Offer what can be offered now. A manifest drops the objects of its version that it does
        not name.
        """
        version = version_of(cached.key)
        with self._changed:
            if version is None or self._objects.get(cached.key) is not cached:
                return
            if file_name_of(cached.key) == MANIFEST:
                self._take_manifest(version, cached)
            self._publish(version)
            self._notify()

    def announce(self, record: WeightsAnnounced, term: int) -> None:
        """Drops the version if it has another manifest than the announced one, and unannounced
        versions of lower terms: their trainer was replaced.
        """
        version = record.version
        with self._changed:
            self._announced[version] = record.manifest_hash
            self.fence = max(self.fence, term)
            self._opened = max(self._opened, term)
            for old in sorted(self._announced)[:-ANNOUNCED_MAX]:
                del self._announced[old]
            manifest = self._objects.get(manifest_key(version))
            if manifest is not None and manifest.offer.hash != record.manifest_hash:
                log.error("version %s is not the announced one: dropped", version)
                self.counters["relay_wrong_total"] += 1
                self.drop_version(version)
            self._drop_implausible()
            self._evict(self._kept(Counter()))
            self._notify()

    def note_opened(self, term: int) -> None:
        """Note that a trainer opened this term. No true version has a higher one."""
        with self._changed:
            self._opened = max(self._opened, term)

    def drop_stalled(self, now_s: float) -> None:
        """Drops objects of versions newer than all announced ones, without bytes for
        `STALLED_OBJECT_S` since an earlier call.
        """
        with self._changed:
            arriving = {
                key: cached.written for key, cached in self._objects.items() if not cached.verified
            }
            self._progress = {
                key: moved if moved is not None and moved[0] == at else (at, now_s)
                for key, at in arriving.items()
                for moved in (self._progress.get(key),)
            }
            for key, (_, since_s) in self._progress.items():
                is_unproved = not self._announced or self._is_ahead(version_of(key))
                if now_s - since_s > STALLED_OBJECT_S and is_unproved:
                    log.warning("object %s: no bytes for %g s; dropped", key, STALLED_OBJECT_S)
                    self._drop(key)
                    self._notify()

    def add(self, figure: str, count: int) -> None:
        with self._changed:
            self.counters[figure] += count

    def drop_version(self, version: Version) -> None:
        with self._changed:
            folder = f"{version_folder(version)}/"
            for key in [key for key in self._objects if key.startswith(folder)]:
                self._drop(key)
            self._manifests.pop(version, None)
            self._notify()

    def close(self) -> None:
        with self._changed:
            for key in list(self._objects):
                self._drop(key)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- under the lock --------------------------------------------------------------------------

    def _notify(self) -> None:
        self.count += 1
        self._changed.notify_all()

    def _is_expected(self, key: str, version: Version | None) -> bool:
        """Whether it was started, its version's manifest names it, or that is not here yet and no
        newer version is announced.
        """
        if version is None:
            return False
        if version in self._manifests:
            return key in self._objects or self._entry(version, file_name_of(key)) is not None
        newest = max(self._announced, default=None)
        return key in self._objects or newest is None or version >= newest

    def _entry(self, version: Version, name: str) -> FileEntry | None:
        manifest = self._manifests.get(version)
        files = manifest.files if manifest else ()
        return next((entry for entry in files if entry.name == name), None)

    def _missing(self, version: Version) -> list[ObjectOffer]:
        manifest = self._manifests.get(version)
        offers = (_offer(version, entry) for entry in (manifest.files if manifest else ()))
        return [offer for offer in offers if offer.key not in self._offered]

    def _take_manifest(self, version: Version, cached: CachedObject) -> None:
        try:
            manifest = decode_json(cached.content(), Manifest, cached.key)
            if manifest.version != version or len(manifest.files) > OBJECTS_MAX:
                raise CorruptObject(f"object {cached.key} is not the manifest of {version}")
        except (CorruptObject, NewerRelease) as error:
            log.error("%s", error)
            self.counters["relay_wrong_total"] += 1
            self._drop(cached.key)
            return
        self._manifests[version] = manifest
        folder = f"{version_folder(version)}/"
        for key, other in list(self._objects.items()):
            if key.startswith(folder) and key != cached.key and not self.wants(other.offer):
                log.error("object %s is not the one of its manifest: dropped", key)
                self.counters["relay_wrong_total"] += 1
                self._drop(key)

    def _publish(self, version: Version) -> None:
        if version not in self._manifests:
            return
        folder = f"{version_folder(version)}/"
        for key, cached in self._objects.items():
            if key.startswith(folder) and cached.verified and key not in self._offered:
                cached.publish(self.folder / key)
                self._offered.add(key)

    def _is_ahead(self, version: Version | None) -> bool:
        newest = max(self._announced, default=None)
        return version is not None and newest is not None and version > newest

    def _is_plausible(self, version: Version) -> bool:
        if version in self._announced:
            return True
        # The present trainer cannot have made it.
        if version.term < self.fence or (self._opened and version.term > self._opened):
            return False
        # A trainer pushes a version before it announces it, at most `AHEAD_MAX` ahead.
        newest = max(self._announced, default=None)
        return newest is None or version.number <= newest.number + AHEAD_MAX

    def _drop_implausible(self) -> None:
        versions = {version_of(key) for key in self._objects}
        for version in sorted(v for v in versions if v is not None):
            if not self._is_plausible(version):
                log.warning("version %s was never believed: dropped", version)
                self.drop_version(version)

    def _make_room(self, version: Version, offer: ObjectOffer) -> bool:
        if sum(version_of(key) == version for key in self._objects) >= OBJECTS_MAX:
            return False
        if self._announced and not self._is_believed(version, offer):
            # An unproved object evicts nothing.
            other_bytes = (
                cached.offer.bytes for key, cached in self._objects.items() if key != offer.key
            )
            return sum(other_bytes) + offer.bytes <= self.bytes_max
        retained = self._kept(Counter({version: offer.bytes}), offer.key)
        if version not in retained:
            return False
        self._evict(retained)
        return True

    def _is_believed(self, version: Version, offer: ObjectOffer) -> bool:
        # Only a manifest, or an object that one names, may evict others.
        is_named = version in self._manifests or file_name_of(offer.key) == MANIFEST
        return is_named and not self._is_ahead(version)

    def _kept(self, sizes: Counter[Version], but: str = "") -> frozenset[Version]:
        """Returns what stays when `sizes` bytes are added and the object `but` is gone; versions
        ahead of the announced ones as far as they fit.
        """
        ahead: Counter[Version] = Counter()
        for key, cached in self._objects.items():
            version = version_of(key)
            if version is not None and key != but:
                (ahead if self._is_ahead(version) else sizes)[version] += cached.offer.bytes
        for version, manifest in self._manifests.items():
            if not self._is_ahead(version):
                sizes[version] = max(sizes[version], manifest.bytes)
        newest = sizes[max(self._announced)] if self._announced else 0
        # Room for another version of the newest one's size, for the next push.
        free = max(0, min(newest, self.bytes_max - newest))
        holdings = [CachedVersion(v, size, self._base(v)) for v, size in sizes.items()]
        retained = set(versions_to_keep(holdings, self._versions_max, self.bytes_max - free))
        room = self.bytes_max - sum(sizes[version] for version in retained)
        for version in sorted(ahead):
            if ahead[version] <= room:
                retained.add(version)
                room -= ahead[version]
        return frozenset(retained)

    def _evict(self, retained: frozenset[Version]) -> None:
        for version in sorted({v for k in self._objects if (v := version_of(k))} - retained):
            self.counters["relay_evicted_total"] += 1
            self.drop_version(version)

    def _base(self, version: Version) -> Version | None:
        manifest = self._manifests.get(version)
        return manifest.base if manifest else None

    def _drop(self, key: str) -> None:
        self._objects.pop(key).drop()
        self._offered.discard(key)


def _offer(version: Version, entry: FileEntry) -> ObjectOffer:
    return ObjectOffer(f"{version_folder(version)}/{entry.name}", entry.bytes, entry.hash)
