"""Chooses, turn by turn, where a relay's objects come from: its neighbour, or the bucket.

The head waits while the trainer pushes, and reads the bucket otherwise. Other relays wait for their
neighbour. Objects that the neighbour sent wrong come from the bucket, and so does an announced
version that the neighbour does not bring within `patience_s`.
"""

import logging
import threading
import time
from collections.abc import Callable

from rollstream.errors import StoreError
from rollstream.storage.relay.bucket import BucketReader
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import RelayLost, RelayRefused
from rollstream.storage.relay.neighbour import NeighbourReader
from rollstream.storage.relay.topology import ChainMember, RelayDirectory
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

GRACE_S = 2.0  # after such a silence a push is over; a new head waits so long for its first bytes
IDLE_S = 0.05
FAILED_S = 0.5
BUCKET = "bucket"


class RelayIntake:
    """The thread that fills the relay's cache."""

    def __init__(
        self,
        cache: RelayCache,
        bucket: BucketReader,
        directory: RelayDirectory,
        term: int,
        patience_s: float,
        pushed_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._bucket, self._directory, self._term = cache, bucket, directory, term
        self._patience_s, self._pushed_s, self._clock = patience_s, pushed_s, clock
        self._neighbour = NeighbourReader(cache, self._is_upstream)
        self._head_since_s = float("-inf")
        self._waited: tuple[Version, float] | None = None
        self.upstream = BUCKET
        """Name and term of the relay that it reads from, or `bucket`."""

    def run(self, stop: threading.Event) -> None:
        """Receive until `stop`."""
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
        self._neighbour.disconnect()
        if self._clock() - max(self._pushed_s(), self._head_since_s) < GRACE_S:
            return False
        unfinished = [held.offer for held in self._cache.objects() if not held.verified]
        return self._bucket.fetch_newest(stop) | self._bucket.fetch(unfinished, stop)

    def _fetch_as_member(self, upstream: ChainMember, stop: threading.Event) -> bool:
        received = self._neighbour.receive_next(upstream, stop)
        wrong = self._neighbour.mistrusted
        if wrong:
            held = [held for held in self._cache.objects() if held.key in wrong]
            received |= self._bucket.fetch([one.offer for one in held], stop)
            wrong.intersection_update({one.key for one in held if not one.verified})
        if self._is_overdue(received):
            received |= self._bucket.fetch_newest(stop)
        return received

    def _is_overdue(self, received: bool) -> bool:
        """Whether the newest announced version is not here and nothing arrived for `patience_s`."""
        newest = max(self._cache.announced(), default=None)
        if newest is None or newest in self._cache.versions():
            self._waited = None
        elif received or self._waited is None or self._waited[0] != newest:
            self._waited = newest, self._clock()
        return self._waited is not None and self._clock() - self._waited[1] > self._patience_s

    def _is_upstream(self, member: ChainMember) -> bool:
        upstream = self._directory.upstream(self._term)
        return upstream is not None and upstream.term == member.term
