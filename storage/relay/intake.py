"""Fills a relay's cache: from its upstream, the relay before it in the chain, or from the bucket:
at the head what no push brings, elsewhere what the upstream sent wrong, or a version that stays
away for `patience_s`.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from rollstream.errors import CorruptObject, StoreError
from rollstream.storage.relay.bucket import BucketReader
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import RelayConnection, RelayListing, RelayLost, RelayRefused
from rollstream.storage.relay.object import (
    CachedObject,
    ObjectBusy,
    ObjectDropped,
    ObjectOffer,
    version_of,
)
from rollstream.storage.relay.topology import ChainMember, RelayDirectory
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

LISTING_S = 1.0  # longest wait for a change of the upstream's list of objects
SILENCES_MAX = 3  # in a row; after them, if the upstream has it all, the connection is at fault
WRONG_MAX = 2  # failed transfers of an object after which its key is mistrusted in any case


class NeighbourReader:
    """For one thread. `mistrusted` holds the keys for which the upstream sent wrong bytes."""

    def __init__(self, cache: RelayCache, is_upstream: Callable[[ChainMember], bool]) -> None:
        self._cache, self._is_upstream = cache, is_upstream
        self._connection: RelayConnection | None = None
        self._change_number = -1
        self._listed: tuple[ObjectOffer, ...] = ()
        """The upstream's list of objects at that change."""
        self._wrong: Counter[str] = Counter()
        self._silent: dict[str, int] = {}
        self.mistrusted: set[str] = set()

    def receive_next(self, upstream: ChainMember, stop: threading.Event) -> bool:
        """Receives what the upstream has; waits at most `LISTING_S` for objects, and returns
        whether there were any. Raises `RelayLost` if the upstream does not respond, `RelayRefused`
        if it refuses the request.
        """
        connection = self._connected(upstream)
        listing = connection.listing(self._change_number, LISTING_S)
        if listing.count != self._change_number:
            self._change_number, self._listed = listing.count, listing.objects
        offers = self.wanted(self._listed)
        for offer in offers:
            if stop.is_set() or not self._take(connection, upstream, offer, stop, len(offers) > 1):
                self.disconnect()
                break
        return bool(offers)

    def wanted(self, offers: Iterable[ObjectOffer]) -> list[ObjectOffer]:
        """Returns the newest versions first, within a version in the order of the offers."""
        to_receive: list[ObjectOffer] = []
        for offer in offers:
            cached = self._cache.find(offer.key)
            has = cached is not None and cached.verified and cached.offer.is_same(offer)
            if not has and offer.key not in self.mistrusted and self._cache.wants(offer):
                to_receive.append(offer)
        to_receive.sort(key=lambda offer: version_of(offer.key) or (), reverse=True)
        self._silent = {o.key: self._silent[o.key] for o in to_receive if o.key in self._silent}
        # Objects that brought no bytes while others waited come last, so that a push that never
        # ends delays no other.
        return sorted(to_receive, key=lambda offer: self._silent.get(offer.key, 0))

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._change_number = None, -1

    def _connected(self, upstream: ChainMember) -> RelayConnection:
        if self._connection is not None and self._connection.url != upstream.url:
            self.disconnect()
        if self._connection is None:
            self._connection = RelayConnection(upstream.url)
        return self._connection

    def _take(
        self,
        connection: RelayConnection,
        upstream: ChainMember,
        offer: ObjectOffer,
        stop: threading.Event,
        is_one_of_many: bool,
    ) -> bool:
        cached = self._cache.accept(offer)
        if cached is None or cached.verified:
            return True
        try:
            with cached.writing():
                if not self._receive(connection, upstream, cached, stop, is_one_of_many):
                    return False
        except ObjectBusy:
            return True
        except ObjectDropped:
            return False
        except CorruptObject as error:
            self._note_wrong(connection, upstream, cached, error)
            return False
        self._wrong.pop(cached.key, None)
        self._cache.completed(cached)
        return True

    def _receive(
        self,
        connection: RelayConnection,
        upstream: ChainMember,
        cached: CachedObject,
        stop: threading.Event,
        many: bool,
    ) -> bool:
        """Returns False if the object is given up for now; `many`: other objects wait."""
        if cached.verified:
            return True
        headers = {"Range": f"bytes={cached.written}-"}
        status, _ = connection.request("GET", f"/{cached.key}?receiving=1", headers)
        if status not in (200, 206):
            return False
        silences = 0
        while not cached.verified:
            count = connection.receive_into(cached.room())
            if count:
                cached.advance(count)
                self._cache.add("relay_received_bytes_total", count)
                silences = 0
            else:
                silences += 1
                if stop.is_set() or not self._is_worth_waiting(upstream, cached, silences, many):
                    return False
        return True

    def _is_worth_waiting(
        self, upstream: ChainMember, cached: CachedObject, silences: int, many: bool
    ) -> bool:
        """Whether to wait longer after a silence (`client.SILENCE_S`). Raises `RelayLost` if the
        upstream does not respond.
        """
        if many:
            self._silent[cached.key] = max(self._silent.values(), default=0) + 1
        if many or not self._is_upstream(upstream):
            return False
        # The upstream may itself wait for bytes; this connection waits for the object.
        with RelayConnection(upstream.url) as second:
            offer = _find(second.listing(), cached.key)
        if offer is None or not offer.is_same(cached.offer):
            return False
        return not (offer.verified and silences >= SILENCES_MAX)

    def _note_wrong(
        self,
        connection: RelayConnection,
        upstream: ChainMember,
        cached: CachedObject,
        error: Exception,
    ) -> None:
        log.error("from relay %s/%d: %s", upstream.name, upstream.term, error)
        self._cache.add("relay_wrong_total", 1)
        self._wrong[cached.key] += 1
        try:
            offer = _find(connection.listing(), cached.key)
        except RelayLost:
            offer = None
        # A verified object at the upstream: it or the line is at fault. Otherwise it may have
        # received wrong bytes itself, and receives them again, at most `WRONG_MAX` times.
        if (offer is not None and offer.verified) or self._wrong[cached.key] >= WRONG_MAX:
            self.mistrusted.add(cached.key)
            del self._wrong[cached.key]


def _find(listing: RelayListing, key: str) -> ObjectOffer | None:
    return next((offer for offer in listing.objects if offer.key == key), None)


GRACE_S = 2.0  # a push without a byte for this long is over; a new head waits so long for a push
IDLE_S = 0.05  # pause of a head that had nothing to read
FAILED_S = 0.5  # pause after an error of the store
BUCKET = "bucket"


class RelayIntake:
    """`term` is this relay's place in the chain; `pushed_s(version)` is the time at which a push of
    this or an older version last brought bytes.
    """

    def __init__(
        self,
        cache: RelayCache,
        bucket: BucketReader,
        directory: RelayDirectory,
        term: int,
        patience_s: float,
        pushed_s: Callable[[Version], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._bucket, self._directory, self._term = cache, bucket, directory, term
        self._patience_s, self._pushed_s, self._clock = patience_s, pushed_s, clock
        self._neighbour = NeighbourReader(cache, self._is_upstream)
        self._head_since_s = float("-inf")
        self._waited: tuple[Version, float] | None = None
        self.upstream = BUCKET
        """Name and term of the present upstream; `bucket` at the head."""

    def run(self, stop: threading.Event) -> None:
        """Receives until `stop`. An upstream that fails is suspected in the directory, so that a
        later round has another one.
        """
        while not stop.is_set():
            upstream = self._directory.upstream(self._term)
            if upstream is None and self.upstream != BUCKET:
                self._head_since_s = self._clock()
            self.upstream = f"{upstream.name}/{upstream.term}" if upstream else BUCKET
            try:
                received = (
                    self._fetch_as_head(stop)
                    if upstream is None
                    else self._fetch_as_member(upstream, stop)
                )
                if not received and upstream is None:
                    stop.wait(IDLE_S)
            except (RelayLost, RelayRefused) as error:
                assert upstream is not None
                self._neighbour.disconnect()
                self._directory.suspect(upstream, error)
            except StoreError as error:
                log.warning("%s", error)
                stop.wait(FAILED_S)
        self._neighbour.disconnect()

    def _fetch_as_head(self, stop: threading.Event) -> bool:
        """Read the newest announced version and unfinished objects, unless a push may still bring
        them.
        """
        self._neighbour.disconnect()
        if self._clock() - self._head_since_s < GRACE_S:
            return False
        unfinished = [
            cached.offer
            for cached in self._cache.objects()
            if not cached.verified and not self._is_pushed(version_of(cached.key))
        ]
        read = self._bucket.fetch_newest(stop, self._is_pushed)
        return read | self._bucket.fetch(unfinished, stop)

    def _is_pushed(self, version: Version | None) -> bool:
        """Whether a push of this or an older version brought bytes within `GRACE_S`."""
        assert version is not None, "a cache holds objects of versions only"
        # Each trainer process pushes in order, so older objects may come before these. Pushes of
        # newer versions do not count: if one process's push failed, those of others must not delay
        # the bucket.
        return self._clock() - self._pushed_s(version) < GRACE_S

    def _fetch_as_member(self, upstream: ChainMember, stop: threading.Event) -> bool:
        received = self._neighbour.receive_next(upstream, stop)
        wrong = self._neighbour.mistrusted
        if wrong:
            cached = [present for present in self._cache.objects() if present.key in wrong]
            received |= self._bucket.fetch([present.offer for present in cached], stop)
            wrong.intersection_update({present.key for present in cached if not present.verified})
        if self._is_overdue(received):
            received |= self._bucket.fetch_newest(stop)
        return received

    def _is_overdue(self, received: bool) -> bool:
        newest = max(self._cache.announced(), default=None)
        if newest is None or newest in self._cache.versions():
            self._waited = None
        elif received or self._waited is None or self._waited[0] != newest:
            self._waited = newest, self._clock()
        return self._waited is not None and self._clock() - self._waited[1] > self._patience_s

    def _is_upstream(self, member: ChainMember) -> bool:
        upstream = self._directory.upstream(self._term)
        return upstream is not None and upstream.term == member.term
