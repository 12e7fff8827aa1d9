"""All that one relay holds: objects by key, manifests, and what was announced.

An object is *offered* to the rollouts of the node when its bytes match its hash and the manifest of
its version names that hash; only then does it get the name under which they open it. Neighbours get
bytes earlier, as they come, and verify them again. A manifest that is not the announced one, and
versions of a trainer that was replaced before they were believed, are dropped.

Anybody may say that he pushes a version. So once one is announced, only versions near it are taken,
under a term that has opened; until they are announced they get what room is free and evict nothing;
and what comes to a halt is dropped. A false push costs a relay free room for a while.
"""

import logging
import shutil
import threading
from collections import Counter
from pathlib import Path

from storage.documents import decode
from storage.manifest import FileEntry, Manifest, manifest_key, version_folder
from storage.relay.held import HeldObject
from storage.relay.keeping import Holding, plan_keep
from storage.relay.names import MANIFEST, Offer, name_of, version_of
from streams.errors import CorruptObject
from streams.records import Version, WeightsAnnounced

log = logging.getLogger(__name__)

ANNOUNCED_MAX = 256
INCOMING = ("relay_received_bytes_total", "relay_pushed_bytes_total", "relay_bucket_bytes_total")
AHEAD_MAX = 4
"""Numbers that a push may be ahead of the newest announced version: one is trained, one waits to be
published and one is uploaded."""
SILENT_S = 30.0  # the next head of a broken chain goes on with what is here long before
OBJECTS_MAX = 4096  # of a version: a file of 1 MiB each would be 4 GiB


class Shelf:
    """Safe to share between threads. `folder` is emptied: a killed relay left what is in it."""

    def __init__(self, folder: Path, versions_max: int, bytes_max: int) -> None:
        self.folder = folder
        self._versions_max, self._bytes_max = versions_max, bytes_max
        self._changed = threading.Condition(threading.RLock())
        self._objects: dict[str, HeldObject] = {}
        self._offered: set[str] = set()
        self._manifests: dict[Version, Manifest] = {}
        self._announced: dict[Version, str] = {}
        self._moved: dict[str, tuple[int, float]] = {}
        self._opened = 0
        self._serial = 0
        self.fence = 0
        """Highest term of a trainer that announced something."""
        self.count = 0
        """Changes so far: what a listing is asked to be newer than."""
        self.tally: Counter[str] = Counter()
        for leftover in ("weights", "receiving"):
            shutil.rmtree(folder / leftover, ignore_errors=True)
        (folder / "receiving").mkdir(parents=True)

    # ---- what is there ---------------------------------------------------------------------------

    def find(self, key: str) -> HeldObject | None:
        with self._changed:
            return self._objects.get(key)

    def objects(self) -> list[HeldObject]:
        """In the order in which they were begun."""
        with self._changed:
            return list(self._objects.values())

    def offers(self, after: int, wait_s: float) -> tuple[int, list[Offer]]:
        """The count of changes and everything here or coming; waits until that count is another
        than `after`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.count != after, wait_s)
            held = self._objects.values()
            return self.count, [Offer(o.key, o.offer.bytes, o.offer.hash, o.verified) for o in held]

    def manifest(self, version: Version) -> Manifest | None:
        with self._changed:
            return self._manifests.get(version)

    def announced(self) -> dict[Version, str]:
        """Believed versions and the hashes of their manifests, as far as they were heard of."""
        with self._changed:
            return dict(self._announced)

    def versions(self) -> list[Version]:
        """Those of which every object is offered."""
        with self._changed:
            return sorted(v for v in self._manifests if not self._missing(v))

    def missing(self, version: Version) -> list[Offer]:
        """Objects of a version with a manifest that are not verified here."""
        with self._changed:
            return self._missing(version)

    def bytes(self) -> int:
        with self._changed:
            return sum(held.offer.bytes for held in self._objects.values())

    def is_coming(self, key: str) -> bool:
        """Whether waiting for it makes sense."""
        with self._changed:
            return self._is_coming(key, version_of(key))

    def wait_offered(self, key: str, wait_s: float) -> HeldObject | None:
        """The object once rollouts may have it; None after `wait_s`, at once if it is not even
        coming.
        """
        version = version_of(key)
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._offered or not self._is_coming(key, version), wait_s
            )
            return self._objects.get(key) if key in self._offered else None

    def came(self) -> int:
        """Bytes that came in so far, from wherever: whoever waits sees by it that it moves."""
        with self._changed:
            return sum(self.tally[figure] for figure in INCOMING)

    # ---- changes ---------------------------------------------------------------------------------

    def wants(self, offer: Offer) -> bool:
        """Whether this content may be held under this key: its version is neither fenced off nor
        said to hold something else.
        """
        version = version_of(offer.key)
        with self._changed:
            if version is None or not offer.is_sound or offer.bytes > self._bytes_max:
                return False
            if not self._is_plausible(version):
                return False
            if name_of(offer.key) == MANIFEST:
                return self._announced.get(version, offer.hash) == offer.hash
            entry = self._entry(version, name_of(offer.key))
            known = version in self._manifests
            return not known or (entry is not None and _offer(version, entry).is_same(offer))

    def wants_push(self, offer: Offer) -> bool:
        """Whether it may be pushed: not if it is of an older version that is not announced."""
        version = version_of(offer.key)
        with self._changed:
            is_new = not self._announced or version in self._announced or self._is_ahead(version)
            return is_new and self.wants(offer)

    def accept(self, offer: Offer) -> HeldObject | None:
        """The object to write this content to, new or begun before; older versions make room. None
        when it is unwanted, or older than what is kept.
        """
        version = version_of(offer.key)
        with self._changed:
            present = self._objects.get(offer.key)
            if present is not None and present.offer.is_same(offer):
                return present
            if version is None or not self.wants(offer) or not self._make_room(version, offer):
                return None
            if present is not None:
                log.warning("object %s: other content was begun before; dropped", offer.key)
                self._drop(offer.key)
            self._serial += 1
            held = HeldObject(self.folder / "receiving" / f"{self._serial:08d}", offer)
            self._objects[offer.key] = held
            self._note()
            return held

    def completed(self, held: HeldObject) -> None:
        """All bytes of this object are here and match its hash: offer what can be offered now."""
        version = version_of(held.key)
        with self._changed:
            if version is None or self._objects.get(held.key) is not held:
                return
            if name_of(held.key) == MANIFEST:
                self._take_manifest(version, held)
            self._publish(version)
            self._note()

    def announce(self, record: WeightsAnnounced, term: int) -> None:
        """A version is believed, says the trainer of `term`: what is not it under its name goes,
        and what lower terms had coming.
        """
        version = record.version
        with self._changed:
            self._announced[version] = record.manifest_hash
            self.fence = max(self.fence, term)
            self._opened = max(self._opened, term)
            for old in sorted(self._announced)[:-ANNOUNCED_MAX]:
                del self._announced[old]
            held = self._objects.get(manifest_key(version))
            if held is not None and held.offer.hash != record.manifest_hash:
                log.error("version %s is not the announced one: dropped", version)
                self.tally["relay_wrong_total"] += 1
                self.drop_version(version)
            self._drop_implausible()
            self._evict(self._kept(Counter()))
            self._note()

    def opened(self, term: int) -> None:
        """A trainer begins this term: no version has a higher one."""
        with self._changed:
            self._opened = max(self._opened, term)

    def drop_silent(self, now_s: float) -> None:
        """Forget objects of versions that are not announced to which nothing came for `SILENT_S`
        since an earlier call.
        """
        with self._changed:
            coming = {k: held.at for k, held in self._objects.items() if not held.verified}
            self._moved = {
                key: moved if moved is not None and moved[0] == at else (at, now_s)
                for key, at in coming.items()
                for moved in (self._moved.get(key),)
            }
            for key, (_, since_s) in self._moved.items():
                is_unproved = not self._announced or self._is_ahead(version_of(key))
                if now_s - since_s > SILENT_S and is_unproved:
                    log.warning("object %s: nothing came for %g s; dropped", key, SILENT_S)
                    self._drop(key)
                    self._note()

    def add(self, figure: str, count: int) -> None:
        """Count something that happened."""
        with self._changed:
            self.tally[figure] += count

    def drop_version(self, version: Version) -> None:
        """Forget all of its objects."""
        with self._changed:
            folder = f"{version_folder(version)}/"
            for key in [key for key in self._objects if key.startswith(folder)]:
                self._drop(key)
            self._manifests.pop(version, None)
            self._note()

    def close(self) -> None:
        """Forget everything: memory outlives a process."""
        with self._changed:
            for key in list(self._objects):
                self._drop(key)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- under the lock --------------------------------------------------------------------------

    def _note(self) -> None:
        self.count += 1
        self._changed.notify_all()

    def _is_coming(self, key: str, version: Version | None) -> bool:
        """Whether waiting for it makes sense: begun, named by a manifest, or of the newest version
        that is announced and not here yet.
        """
        if version is None:
            return False
        if version in self._manifests:
            return key in self._objects or self._entry(version, name_of(key)) is not None
        newest = max(self._announced, default=None)
        return key in self._objects or newest is None or version >= newest

    def _entry(self, version: Version, name: str) -> FileEntry | None:
        manifest = self._manifests.get(version)
        files = manifest.files if manifest else ()
        return next((entry for entry in files if entry.name == name), None)

    def _missing(self, version: Version) -> list[Offer]:
        manifest = self._manifests.get(version)
        wanted = (_offer(version, entry) for entry in (manifest.files if manifest else ()))
        return [offer for offer in wanted if offer.key not in self._offered]

    def _take_manifest(self, version: Version, held: HeldObject) -> None:
        try:
            manifest = decode(held.content(), Manifest, held.key)
            if manifest.version != version or len(manifest.files) > OBJECTS_MAX:
                raise CorruptObject(f"object {held.key} is not the manifest of {version}")
        except CorruptObject as error:
            log.error("%s", error)
            self.tally["relay_wrong_total"] += 1
            self._drop(held.key)
            return
        self._manifests[version] = manifest
        folder = f"{version_folder(version)}/"
        for key, other in list(self._objects.items()):
            if key.startswith(folder) and key != held.key and not self.wants(other.offer):
                log.error("object %s is not the one of its manifest: dropped", key)
                self.tally["relay_wrong_total"] += 1
                self._drop(key)

    def _publish(self, version: Version) -> None:
        if version not in self._manifests:
            return
        folder = f"{version_folder(version)}/"
        for key, held in self._objects.items():
            if key.startswith(folder) and held.verified and key not in self._offered:
                held.publish(self.folder / key)
                self._offered.add(key)

    def _is_ahead(self, version: Version | None) -> bool:
        """Whether it is newer than all that is announced; False before anything is."""
        newest = max(self._announced, default=None)
        return version is not None and newest is not None and version > newest

    def _is_plausible(self, version: Version) -> bool:
        """Whether the present trainer, or before it one that announced it, can have made it."""
        if version in self._announced:
            return True
        if version.term < self.fence or (self._opened and version.term > self._opened):
            return False
        newest = max(self._announced, default=None)
        return newest is None or version.number <= newest.number + AHEAD_MAX

    def _drop_implausible(self) -> None:
        versions = {version_of(key) for key in self._objects}
        for version in sorted(v for v in versions if v is not None):
            if not self._is_plausible(version):
                log.warning("version %s was never believed: dropped", version)
                self.drop_version(version)

    def _make_room(self, version: Version, offer: Offer) -> bool:
        """Evict what the bounds no longer allow with this object; False if that is its version, or
        if it is not announced and would need more than what is free.
        """
        if sum(version_of(key) == version for key in self._objects) >= OBJECTS_MAX:
            return False
        if self._announced and not self._is_believed(version, offer):
            held = (one.offer.bytes for key, one in self._objects.items() if key != offer.key)
            return sum(held) + offer.bytes <= self._bytes_max
        kept = self._kept(Counter({version: offer.bytes}), offer.key)
        if version not in kept:
            return False
        self._evict(kept)
        return True

    def _is_believed(self, version: Version, offer: Offer) -> bool:
        """Whether this object may evict others: its manifest is here and names it, or is it."""
        known = version in self._manifests or name_of(offer.key) == MANIFEST
        return known and not self._is_ahead(version)

    def _kept(self, sizes: Counter[Version], but: str = "") -> frozenset[Version]:
        """What stays beside `sizes`, the object `but` left out: room for one more version like the
        newest stays free where it can, for the next push; versions ahead stay as far as they fit.
        """
        ahead: Counter[Version] = Counter()
        for key, held in self._objects.items():
            of = version_of(key)
            if of is not None and key != but:
                (ahead if self._is_ahead(of) else sizes)[of] += held.offer.bytes
        for of, manifest in self._manifests.items():
            if not self._is_ahead(of):
                sizes[of] = max(sizes[of], manifest.bytes)
        newest = sizes[max(self._announced)] if self._announced else 0
        free = max(0, min(newest, self._bytes_max - newest))
        holdings = [Holding(of, size, self._base(of)) for of, size in sizes.items()]
        kept = set(plan_keep(holdings, self._versions_max, self._bytes_max - free))
        room = self._bytes_max - sum(sizes[of] for of in kept)
        for of in sorted(ahead):
            if ahead[of] <= room:
                kept.add(of)
                room -= ahead[of]
        return frozenset(kept)

    def _evict(self, kept: frozenset[Version]) -> None:
        """Forget versions that are not `kept`."""
        for of in sorted({v for k in self._objects if (v := version_of(k))} - kept):
            self.tally["relay_evicted_total"] += 1
            self.drop_version(of)

    def _base(self, version: Version) -> Version | None:
        manifest = self._manifests.get(version)
        return manifest.parent if manifest and manifest.kind == "delta" else None

    def _drop(self, key: str) -> None:
        self._objects.pop(key).drop()
        self._offered.discard(key)


def _offer(version: Version, entry: FileEntry) -> Offer:
    return Offer(f"{version_folder(version)}/{entry.name}", entry.bytes, entry.hash)
