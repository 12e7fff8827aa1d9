"""Fills a relay's cache with the objects of weight versions: tensor files and manifests.

Relays form a chain. `RelayIntake` receives from the relay before this one, its upstream, through
`NeighbourReader`. The first relay, the head, has no upstream: the trainer pushes objects to it, and
it reads those that no push brings from the bucket (the object store). The others read from the
bucket what their upstream sent wrong, and an announced version that stays away for `patience_s`. If
a source dies, the received bytes stay, and the next source continues at the first missing one.
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
    """Receives objects from the upstream, also those that the upstream itself is still receiving.
    Only one thread may use it. `mistrusted` holds the keys for which the upstream sent wrong bytes;
    the caller reads these objects from the bucket.
    """

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
        """Receive the objects that the upstream has or is receiving, and that this relay lacks;
        waits at most `LISTING_S` if there are none. Returns whether there were any. Raises
        `RelayLost` if the upstream does not respond, `RelayRefused` if it refuses the request.
        """
        connection = self._connected(upstream)
        listing = connection.listing(self._change_number, LISTING_S)
        if listing.count != self._change_number:
            self._change_number, self._listed = listing.count, listing.objects
        wanted = self.wanted(self._listed)
        for offer in wanted:
            if stop.is_set() or not self._take(connection, upstream, offer, stop, len(wanted) > 1):
                self.disconnect()
                break
        return bool(wanted)

    def wanted(self, offers: Iterable[ObjectOffer]) -> list[ObjectOffer]:
        """Returns the offers to receive: newest versions first, within a version in the order of
        the offers. Objects that brought no bytes while others waited come last, so that an object
        whose push never ends delays no other.
        """
        wanted: list[ObjectOffer] = []
        for offer in offers:
            held = self._cache.find(offer.key)
            has = held is not None and held.verified and held.offer.is_same(offer)
            if not has and offer.key not in self.mistrusted and self._cache.wants(offer):
                wanted.append(offer)
        wanted.sort(key=lambda offer: version_of(offer.key) or (), reverse=True)
        self._silent = {o.key: self._silent[o.key] for o in wanted if o.key in self._silent}
        return sorted(wanted, key=lambda offer: self._silent.get(offer.key, 0))

    def disconnect(self) -> None:
        """Close the connection; the next turn opens a new one."""
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
        """Receive one object. Returns whether the connection can be used for the next one."""
        held = self._cache.accept(offer)
        if held is None or held.verified:
            return True
        try:
            with held.writing():
                if not self._receive(connection, upstream, held, stop, is_one_of_many):
                    return False
        except ObjectBusy:
            return True
        except ObjectDropped:
            return False
        except CorruptObject as error:
            self._note_wrong(connection, upstream, held, error)
            return False
        self._wrong.pop(held.key, None)
        self._cache.completed(held)
        return True

    def _receive(
        self,
        connection: RelayConnection,
        upstream: ChainMember,
        held: CachedObject,
        stop: threading.Event,
        many: bool,
    ) -> bool:
        """Receive all missing bytes, from the first one on that no earlier source brought. Returns
        False if the object is given up for now; `many` states that other objects wait.
        """
        if held.verified:
            return True
        headers = {"Range": f"bytes={held.written}-"}
        status, _ = connection.request("GET", f"/{held.key}?receiving=1", headers)
        if status not in (200, 206):
            return False
        silences = 0
        while not held.verified:
            count = connection.receive_into(held.room())
            if count:
                held.advance(count)
                self._cache.add("relay_received_bytes_total", count)
                silences = 0
            else:
                silences += 1
                if stop.is_set() or not self._is_worth_waiting(upstream, held, silences, many):
                    return False
        return True

    def _is_worth_waiting(
        self, upstream: ChainMember, held: CachedObject, silences: int, many: bool
    ) -> bool:
        """Returns, after a silence (`client.SILENCE_S` without a byte), whether to wait longer for
        this object. The upstream may itself wait for bytes, so it is asked over a second
        connection; `RelayLost` is raised if it does not respond.

        False if other objects wait (`many`), if another relay has become the upstream, if the
        upstream no longer has the object, or if it has all of it and `SILENCES_MAX` is reached.
        """
        if many:
            self._silent[held.key] = max(self._silent.values(), default=0) + 1
        if many or not self._is_upstream(upstream):
            return False
        with RelayConnection(upstream.url) as second:
            offer = _find(second.listing(), held.key)
        if offer is None or not offer.is_same(held.offer):
            return False
        return not (offer.verified and silences >= SILENCES_MAX)

    def _note_wrong(
        self,
        connection: RelayConnection,
        upstream: ChainMember,
        held: CachedObject,
        error: Exception,
    ) -> None:
        """Count the wrong bytes, and mistrust the key if the upstream or the line from it is at
        fault: the upstream has verified the object, yet other bytes arrived here.

        An upstream that has not verified the object may have received wrong bytes itself. It
        receives the object again, and then so does this relay; after `WRONG_MAX` failures the key
        is mistrusted in any case.
        """
        log.error("from relay %s/%d: %s", upstream.name, upstream.term, error)
        self._cache.add("relay_wrong_total", 1)
        self._wrong[held.key] += 1
        try:
            offer = _find(connection.listing(), held.key)
        except RelayLost:
            offer = None
        if (offer is not None and offer.verified) or self._wrong[held.key] >= WRONG_MAX:
            self.mistrusted.add(held.key)
            del self._wrong[held.key]


def _find(listing: RelayListing, key: str) -> ObjectOffer | None:
    return next((offer for offer in listing.objects if offer.key == key), None)


GRACE_S = 2.0  # a push without a byte for this long is over; a new head waits so long for a push
IDLE_S = 0.05  # pause of a head that had nothing to read
FAILED_S = 0.5  # pause after an error of the store
BUCKET = "bucket"


class RelayIntake:
    """Fills the relay's cache in a thread (`run`), in rounds; each chooses its sources again.
    `term` is this relay's place in the chain; `pushed_s(version)` returns the time at which a push
    of this version, or of an older one, last brought bytes.
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
        """Receive until `stop`. An upstream that fails is reported to the directory as suspected,
        so that a later round has another one.
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
        """Read from the bucket what no push may still bring: the newest announced version, and
        unfinished objects. Returns whether anything was read.
        """
        self._neighbour.disconnect()
        if self._clock() - self._head_since_s < GRACE_S:
            return False
        unfinished = [
            held.offer
            for held in self._cache.objects()
            if not held.verified and not self._is_pushed(version_of(held.key))
        ]
        read = self._bucket.fetch_newest(stop, self._is_pushed)
        return read | self._bucket.fetch(unfinished, stop)

    def _is_pushed(self, version: Version | None) -> bool:
        """Returns whether a push may still bring objects of this version: a push of it or of an
        older version brought bytes within `GRACE_S`.

        Each process of the trainer pushes its objects in order, so objects of an older version may
        still be pushed before those of this one. Pushes of newer versions do not count: if the push
        of one process failed, later pushes of the others must not delay the read from the bucket.
        """
        assert version is not None, "a cache holds objects of versions only"
        return self._clock() - self._pushed_s(version) < GRACE_S

    def _fetch_as_member(self, upstream: ChainMember, stop: threading.Event) -> bool:
        """Receive from the upstream, and read mistrusted objects and an overdue version from the
        bucket. Returns whether anything was received.
        """
        received = self._neighbour.receive_next(upstream, stop)
        wrong = self._neighbour.mistrusted
        if wrong:
            cached = [held for held in self._cache.objects() if held.key in wrong]
            received |= self._bucket.fetch([held.offer for held in cached], stop)
            wrong.intersection_update({held.key for held in cached if not held.verified})
        if self._is_overdue(received):
            received |= self._bucket.fetch_newest(stop)
        return received

    def _is_overdue(self, received: bool) -> bool:
        """Returns whether the newest announced version is incomplete here although nothing has
        arrived for `patience_s`.
        """
        newest = max(self._cache.announced(), default=None)
        if newest is None or newest in self._cache.versions():
            self._waited = None
        elif received or self._waited is None or self._waited[0] != newest:
            self._waited = newest, self._clock()
        return self._waited is not None and self._clock() - self._waited[1] > self._patience_s

    def _is_upstream(self, member: ChainMember) -> bool:
        upstream = self._directory.upstream(self._term)
        return upstream is not None and upstream.term == member.term
