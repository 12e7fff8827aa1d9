"""Reads files of weight versions (objects) from the object store, the bucket, into a relay's cache.

Relays form a chain: each reads from the relay before it, its neighbour, and the trainer pushes to
the first one, the head. The bucket is the other source: for the head if no push brings an object,
and for a relay whose neighbour fails or sends wrong bytes. An object in the cache is not read
again, and reading continues after the last received byte, whichever source it came from. A missing
object (its upload may still run) or one with a wrong hash is read again later.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from rollstream.errors import CorruptObject, ObjectMissing, StoreError
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.object import CachedObject, ObjectBusy, ObjectDropped, ObjectOffer
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.manifest import manifest_key
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

READ_BYTES = 32 << 20  # of one request
RETRY_S = 0.1  # after an object could not be read; doubled with each retry
RETRY_S_MAX = 5.0
WRONG_RETRY_S = 30.0  # after an object had a wrong hash, or the cache refused a manifest
POSTPONED_MAX = 10_000  # objects whose delays are remembered; above it all are forgotten


class BucketReader:
    """Reads the objects that a cache lacks from the bucket into it; to be used by one thread."""

    def __init__(
        self, cache: RelayCache, store: ObjectStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache, self._store, self._clock = cache, store, clock
        self._not_before_s: dict[str, float] = {}
        self._delay_s: dict[str, float] = {}
        self._bases_of: Version | None = None

    def fetch_newest(
        self, stop: threading.Event, is_pushed: Callable[[Version], bool] = lambda _: False
    ) -> bool:
        """Read the manifest of the newest announced version, then the missing objects of every
        announced version whose manifest is here, newest version first. A version is left out while
        `is_pushed` is true for it: a push may still bring it. Once the newest version is complete,
        its bases are read. Returns whether any object was read to its end.
        """
        announced = self._cache.announced()
        if not announced:
            return False
        newest = max(announced)
        may_read = not is_pushed(newest)
        read = may_read and self._manifest(newest, announced[newest])
        held = (v for v in announced if self._cache.manifest(v) is not None and not is_pushed(v))
        for version in sorted(held, reverse=True):
            read |= self.fetch(self._cache.missing(version), stop)
        is_whole = may_read and not read and not self._cache.missing(newest)
        if is_whole and self._bases_of != newest:
            self._bases_of = newest
            read = self._bases(newest, stop)
        return read

    def fetch(self, offers: Iterable[ObjectOffer], stop: threading.Event) -> bool:
        """Read those of these objects that the cache accepts, that are not complete, and whose
        retry is due. Returns whether any object was read to its end.
        """
        read = False
        for offer in offers:
            if stop.is_set() or self._clock() < self._not_before_s.get(offer.key, 0.0):
                continue
            held = self._cache.accept(offer)
            if held is not None and not held.verified:
                read |= self._object(held, stop)
        return read

    def _manifest(self, version: Version, wanted: str | None) -> bool:
        """Read the version's manifest, unless it is here; its hash must be `wanted` (None: any).
        Returns whether it was read and is now in the cache.
        """
        key = manifest_key(version)
        if self._cache.manifest(version) is not None or self._clock() < self._not_before_s.get(
            key, 0.0
        ):
            return False
        try:
            data = self._store.get(key)
        except StoreError as error:
            self._postpone(key, error)
            return False
        self._cache.add("relay_bucket_bytes_total", len(data))
        digest = content_hash(data)
        if wanted is not None and digest != wanted:
            self._note_wrong(key, f"object {key} has hash {digest}, announced {wanted}")
            return False
        held = self._cache.accept(ObjectOffer(key, len(data), digest))
        if held is None:
            self._not_before_s[key] = self._clock() + WRONG_RETRY_S
            return False
        try:
            with held.writing():
                _write(held, data[held.written :])
        except (ObjectBusy, ObjectDropped):
            return False
        self._cache.completed(held)
        return True

    def _object(self, held: CachedObject, stop: threading.Event) -> bool:
        """Read the rest of an object. Returns whether it was read to its end, correct or not."""
        try:
            with held.writing():
                while not held.verified:
                    if stop.is_set():
                        return False
                    end = min(held.offer.bytes, held.written + READ_BYTES)
                    data = self._store.get(held.key, held.written, end)
                    self._cache.add("relay_bucket_bytes_total", len(data))
                    if len(data) != end - held.written:
                        held.restart()
                        raise CorruptObject(f"object {held.key} of the bucket is too short")
                    _write(held, data)
        except (ObjectBusy, ObjectDropped):
            return False
        except CorruptObject as error:
            self._note_wrong(held.key, str(error))
            return True
        except StoreError as error:
            self._postpone(held.key, error)
            return False
        self._cache.completed(held)
        return True

    def _bases(self, newest: Version, stop: threading.Event) -> bool:
        """Read the versions on which a delta is based, down to the anchor, or an adapter's base, as
        far as the cache has room. A restarted rollout needs them and finds them here. They are read
        once for each newest version.
        """
        read, version = False, newest
        while not stop.is_set():
            manifest = self._cache.manifest(version)
            if manifest is None or manifest.base is None:
                return read
            version = manifest.base
            base_hash = manifest.delta.parent_hash if manifest.delta else None
            if manifest.adapter:
                base_hash = manifest.adapter.base_hash
            read |= self._manifest(version, base_hash)
            read |= self.fetch(self._cache.missing(version), stop)
        return read

    def _postpone(self, key: str, error: StoreError) -> None:
        """Delay the next read of this object, twice as long as the time before."""
        if len(self._not_before_s) >= POSTPONED_MAX:
            self._not_before_s.clear()
            self._delay_s.clear()
        if not isinstance(error, ObjectMissing):
            log.warning("object %s cannot be read from the bucket: %s", key, error)
        self._delay_s[key] = min(RETRY_S_MAX, 2 * self._delay_s.get(key, RETRY_S / 2))
        self._not_before_s[key] = self._clock() + self._delay_s[key]

    def _note_wrong(self, key: str, message: str) -> None:
        log.error("from the bucket: %s", message)
        self._cache.add("relay_wrong_total", 1)
        self._not_before_s[key] = self._clock() + WRONG_RETRY_S


def _write(held: CachedObject, data: bytes) -> None:
    """Append the bytes to the object. Raises `CorruptObject` if the last byte completes an object
    with a wrong hash.
    """
    with memoryview(data) as view:
        at = 0
        while not held.verified:
            room = held.room()
            count = min(len(room), len(view) - at)
            if not count:
                return
            room[:count] = view[at : at + count]
            at += count
            held.advance(count)
