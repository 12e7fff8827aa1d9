"""Follows the `weights` topic and fetches a version beside generation, so that only the swap itself
stops decoding.

Only announced versions are fetched, and a version is announced after `latest.json` was swapped to
it (invariant 6); every tensor was compared with its hash before it is handed on.
"""

import logging
import threading
import time
from dataclasses import dataclass

import torch

from storage.fetch import fetch
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.errors import CorruptObject, ObjectMissing
from streams.figures import SECONDS, Tally
from streams.reader import TopicReader, from_begin
from streams.records import Version, WeightsAnnounced

log = logging.getLogger(__name__)

FETCH_TRIES = 5


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified tensors of one version, in checkpoint names."""

    announced: WeightsAnnounced
    tensors: dict[str, torch.Tensor]


class WeightsFollower:
    """The newest announced version, and its tensors once they are here."""

    def __init__(self, bus: Bus, store: ObjectStore) -> None:
        self._store = store
        self._reader = TopicReader(bus, "weights", from_begin(bus, "weights"))
        self._newest: WeightsAnnounced | None = None
        self._thread: threading.Thread | None = None
        self._fetched: Fetched | None = None
        self._failed: BaseException | None = None
        self.fetched_bytes = 0
        self.fetch_s = Tally(SECONDS)

    @property
    def newest(self) -> WeightsAnnounced | None:
        return self._newest

    def readers(self) -> list[TopicReader]:
        return [self._reader]

    def read(self) -> None:
        """Note what was announced since the last call."""
        for received in self._reader.follow():
            record = received.record
            if isinstance(record, WeightsAnnounced) and (
                self._newest is None or record.version > self._newest.version
            ):
                self._newest = record

    def prefetch(self, held: Version | None) -> None:
        """Start to fetch the newest version unless it is held, here or on its way."""
        newest = self._newest
        if newest is None or self._thread is not None or newest.version == held:
            return
        if self._fetched is None or self._fetched.announced.version < newest.version:
            self._thread = threading.Thread(target=self._fetch, args=(newest,), daemon=True)
            self._thread.start()

    def take(self) -> Fetched | None:
        """The fetched version, once; raises what the fetch failed with after its tries."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._failed is not None:
            raise self._failed
        if self._thread is not None:
            return None
        fetched, self._fetched = self._fetched, None
        return fetched

    def _fetch(self, announced: WeightsAnnounced) -> None:
        """A version may be deleted by retention while it is fetched: the next announced one
        replaces it.
        """
        for attempt in range(FETCH_TRIES):
            started = time.monotonic()
            try:
                _, tensors = fetch(self._store, announced.version, announced.manifest_hash)
                self.fetch_s.add(time.monotonic() - started)
                self.fetched_bytes += announced.bytes
                self._fetched = Fetched(announced, tensors)
                return
            except (ObjectMissing, CorruptObject) as error:
                log.warning("version %s could not be fetched: %s", announced.version, error)
                self._failed_after(attempt, announced, error)
            except OSError as error:
                self._failed_after(attempt, announced, error)
            time.sleep(0.1 * 2**attempt)

    def _failed_after(
        self, attempt: int, announced: WeightsAnnounced, error: BaseException
    ) -> None:
        newest = self._newest
        superseded = newest is not None and newest.version > announced.version
        if attempt == FETCH_TRIES - 1 and not superseded:
            self._failed = error
