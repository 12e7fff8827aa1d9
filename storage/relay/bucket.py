"""Reads files of weight versions from the object store (the bucket) into a relay's cache, after the
last byte that any source brought.
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
        """Read the newest version's manifest, the missing objects of announced versions, newest
        first, and the newest version's bases, without versions for which `is_pushed`. True if any
        object was read to its end.
        """
        announced = self._cache.announced()
        if not announced:
            return False
        newest = max(announced)
        may_read = not is_pushed(newest)
        read = may_read and self._manifest(newest, announced[newest])
        readable = (
            v for v in announced if self._cache.manifest(v) is not None and not is_pushed(v)
        )
        for version in sorted(readable, reverse=True):
            read |= self.fetch(self._cache.missing(version), stop)
        is_whole = may_read and not read and not self._cache.missing(newest)
        if is_whole and self._bases_of != newest:
            self._bases_of = newest
            read = self._bases(newest, stop)
        return read

    def fetch(self, offers: Iterable[ObjectOffer], stop: threading.Event) -> bool:
        """Reads those that the cache accepts and whose retry is due; returns whether any was read
        to its end.
        """
        read = False
        for offer in offers:
            if stop.is_set() or self._clock() < self._not_before_s.get(offer.key, 0.0):
                continue
            cached = self._cache.accept(offer)
            if cached is not None and not cached.verified:
                read |= self._object(cached, stop)
        return read

    def _manifest(self, version: Version, manifest_hash: str | None) -> bool:
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
        if manifest_hash is not None and digest != manifest_hash:
            self._note_wrong(key, f"object {key} has hash {digest}, announced {manifest_hash}")
            return False
        cached = self._cache.accept(ObjectOffer(key, len(data), digest))
        if cached is None:
            self._not_before_s[key] = self._clock() + WRONG_RETRY_S
            return False
        try:
            with cached.writing():
                _write(cached, data[cached.written :])
        except (ObjectBusy, ObjectDropped):
            return False
        self._cache.completed(cached)
        return True

    def _object(self, cached: CachedObject, stop: threading.Event) -> bool:
        try:
            with cached.writing():
                while not cached.verified:
                    if stop.is_set():
                        return False
                    end = min(cached.offer.bytes, cached.written + READ_BYTES)
                    data = self._store.get(cached.key, cached.written, end)
                    self._cache.add("relay_bucket_bytes_total", len(data))
                    if len(data) != end - cached.written:
                        cached.restart()
                        raise CorruptObject(f"object {cached.key} of the bucket is too short")
                    _write(cached, data)
        except (ObjectBusy, ObjectDropped):
            return False
        except CorruptObject as error:
            self._note_wrong(cached.key, str(error))
            return True
        except StoreError as error:
            self._postpone(cached.key, error)
            return False
        self._cache.completed(cached)
        return True

    def _bases(self, newest: Version, stop: threading.Event) -> bool:
        """Read the versions on which this one is based, as far as the cache has room: a restarted
        rollout needs them.
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


def _write(cached: CachedObject, data: bytes) -> None:
    with memoryview(data) as view:
        at = 0
        while not cached.verified:
            room = cached.room()
            count = min(len(room), len(view) - at)
            if not count:
                return
            room[:count] = view[at : at + count]
            at += count
            cached.advance(count)
