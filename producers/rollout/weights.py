"""Follows the announced versions of a weight stream and fetches them beside generation, into a file
that the rollout holds beside its engine, so that only the swap stops decoding. A version is
announced once `latest.json` named it (invariant 6; docs/explanation/weights.md).

Reading list: ends here, after `storage/weights/pointer.py`.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection

import torch

from rollstream.errors import CorruptObject, EngineRefused, ObjectMissing
from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.merged_update import merged_update
from rollstream.producers.rollout.read_back import (
    FetchedWeights,
    ReadBack,
    ReadBackResult,
    TensorRotation,
    compare_tensors,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.mapped import MappedWeights
from rollstream.storage.weights.named_streams import POLICY, WeightStream
from rollstream.storage.weights.publish import announcement
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Opened, WeightsAnnounced
from rollstream.streams.release import SHARED_FEATURES, check_readable_by
from rollstream.streams.values import Version

log = logging.getLogger(__name__)
TRAINER = "trainer"  # its role
FETCH_TRIES = 5
REPAIRS_MAX = 3  # in a row


class WeightsFollower:
    """Fetches the newest announced version: the rollout calls `prefetch`, then `take`, swaps the
    engine's weights, and calls `compare`. One background thread fetches or compares, never both, so
    the tensors do not change between `take` and `verdict`.

    The topic of a named `stream` must exist (`bus.create([stream.topic])`, which may be repeated).
    """

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        timer: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stream: WeightStream = POLICY,
    ) -> None:
        self._store, self._sleep = stream.part(store), sleep
        topic = stream.topic.name
        self._reader = TopicReader(bus, topic, from_begin(bus, topic), with_opened=True)
        self._timer = timer
        self._weights = MappedWeights()
        self._rotation = TensorRotation()
        self._newest: WeightsAnnounced | None = None
        self._thread: threading.Thread | None = None
        self._fetched: FetchedWeights | None = None
        self._verdict: ReadBackResult | None = None
        self._failed: BaseException | None = None
        self._is_comparing = False
        self._taken: WeightsAnnounced | None = None
        self._repairing, self._repairs = False, 0
        self.prepare: Callable[[WeightUpdate], WeightUpdate] = lambda update: update
        """The engine's own preparation of an update, set once there is an engine."""
        self.hold_name: Callable[[], None] = lambda: None
        """In the background thread after each fetch: creates the object of this rollout's name
        again if dispatch deleted it (`storage/terms.py`).
        """
        self.writes: Collection[str] = SHARED_FEATURES
        """The features of this rollout's records. A trainer that lacks one could not read them:
        `read` then raises `NewerRelease` (invariant 14).
        """
        self.unavailable: Version | None = None
        """The last version that `fetch_version` could not fetch."""
        self.fetched_bytes = 0
        self.fetch_s = MetricHistogram(SECONDS_BUCKETS)

    @property
    def newest(self) -> WeightsAnnounced | None:
        return self._newest

    @property
    def verified(self) -> bool:
        """False from a mismatch until all tensors of a newly fetched version were compared."""
        return not self._repairing

    def readers(self) -> list[TopicReader]:
        return [self._reader]

    def read(self) -> None:
        for received in self._reader.follow():
            record = received.record
            # The publisher of a named stream reads nothing that this rollout writes.
            if isinstance(record, Opened) and record.role == TRAINER:
                check_readable_by(record, self.writes)
            if isinstance(record, WeightsAnnounced) and (
                self._newest is None or record.version > self._newest.version
            ):
                self._newest = record

    def prefetch(self, served: Version | None) -> None:
        """Fetch the newest version, unless the engine serves it (`served`), a fetch or comparison
        runs, or its result was not taken yet.
        """
        newest = self._newest
        if newest is not None and newest.version != served and self._is_idle():
            self._begin(lambda: self._fetch(newest))

    def fetch_ahead(self, served: Version | None) -> None:
        """As `prefetch`, but a newer version replaces a fetched one. Its update starts at the
        served version, so decoding never stops for the version between.
        """
        fetched, newest = self._fetched, self._newest
        if fetched is None:
            self.prefetch(served)
            return
        is_old = newest is not None and fetched.announced.version < newest.version
        if newest is not None and is_old and not self.is_busy():
            self._fetched = None
            self._begin(lambda: self._fetch(newest, after=fetched.update))

    def take(self) -> FetchedWeights | None:
        """Returns the fetched version once; its tensors do not change until the verdict of
        `compare`, or the next `prefetch`. Raises the error of a fetch whose tries all failed.
        """
        if self.is_busy():
            return None
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            self._taken = fetched.announced
        return fetched

    def compare(self, fetched: FetchedWeights, read_back: ReadBack, seconds: float) -> None:
        """Start to compare a bounded sample of tensors (after a repair all) with the served ones,
        after an update of `seconds`.
        """
        sizes = {name: tensor.nbytes for name, tensor in fetched.update.tensors.items()}
        names = None if fetched.repairs else self._rotation.next(sizes)
        self._is_comparing = True
        self._begin(lambda: self._compare(fetched, read_back, names, seconds))

    def verdict(self) -> ReadBackResult | None:
        """Returns the comparison's result, once. After a mismatch `verified` is False until the
        repaired version was compared in full.
        """
        if self.is_busy():
            return None
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            self._is_comparing = False
            self._repairing = bool(verdict.compared.differing)
            self._repairs = self._repairs if self._repairing else 0
        return verdict

    def await_verdict(self) -> None:
        """Wait for the verdict of a comparison that was started; returns at once without one."""
        if self._is_comparing and self._thread is not None:
            self._thread.join()

    def repair(self, keep: bool) -> None:
        """Fetch the newest version, or with `keep` the one taken last, into new memory; does
        nothing while a fetch runs. Raises `EngineRefused` after `REPAIRS_MAX` repairs in a row
        without success.
        """
        announced = self._taken if keep else self._newest
        if announced is None or not self._is_idle():
            return
        if self._repairs >= REPAIRS_MAX:
            raise EngineRefused(
                f"weights: all tensors were fetched again {REPAIRS_MAX} times, and each time the "
                "engine served different ones: suspect this machine's memory"
            )
        self._repairs += 1
        self._weights = MappedWeights()
        self._begin(lambda: self._fetch(announced, or_newer=not keep))

    def fetch_version(self, version: Version) -> None:
        """Fetches exactly this version; does nothing while another fetch runs. If it fails,
        `unavailable` names the version and no error is raised.
        """
        ahead = self._fetched
        if ahead is not None and not ahead.repairs and ahead.announced.version != version:
            self._fetched = None  # another version, fetched ahead and not needed now
        if self.unavailable != version and self._is_idle():
            self._begin(lambda: self._fetch_old(version))

    def is_busy(self) -> bool:
        """Returns whether a fetch or comparison runs; raises the error of one that failed."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._failed is not None:
            raise self._failed
        return self._thread is not None

    def _is_idle(self) -> bool:
        return not self.is_busy() and self._fetched is None and self._verdict is None

    def _begin(self, work: Callable[[], None]) -> None:
        assert self._thread is None, "one fetch or comparison at a time"
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        torch.set_num_threads(1)  # for this thread: the other cores decode
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again in the worker's thread
            self._failed = error

    def _fetch(
        self, announced: WeightsAnnounced, or_newer: bool = True, after: WeightUpdate | None = None
    ) -> None:
        for attempt in range(FETCH_TRIES):
            try:
                _, update = self._updated(announced.version, announced.manifest_hash, after)
            except (ObjectMissing, CorruptObject, OSError) as error:
                log.warning("version %s could not be fetched: %s", announced.version, error)
                # Retention may have deleted the version meanwhile.
                newest = self._newest
                if or_newer and newest is not None and newest.version > announced.version:
                    announced = newest
                elif attempt == FETCH_TRIES - 1:
                    raise
                self._sleep(0.1 * 2**attempt)
                continue
            self.hold_name()
            self._fetched = FetchedWeights(announced, update, self._repairing)
            return
        raise ObjectMissing(
            f"version {announced.version} and those before it were deleted while fetched"
        )

    def _fetch_old(self, version: Version) -> None:
        try:
            manifest, update = self._updated(version)
        except (ObjectMissing, CorruptObject, OSError) as error:
            log.warning("version %s cannot be fetched from history: %s", version, error)
            self.unavailable = version
            return
        announced = announcement(manifest, manifest.created_s)
        self._fetched = FetchedWeights(announced, update)

    def _updated(
        self, version: Version, manifest_hash: str | None = None, after: WeightUpdate | None = None
    ) -> tuple[Manifest, WeightUpdate]:
        """Returns the version's manifest and the prepared update; `after` is an earlier one that
        the engine never took. What the engine serves is unchanged, and after an error the next call
        starts over.
        """
        started = self._timer()
        moved = self._weights.update(self._store, version, manifest_hash)
        self.fetch_s.add(self._timer() - started)
        self.fetched_bytes += moved.fetched_bytes
        manifest = moved.manifest
        update = WeightUpdate(
            manifest.version,
            self._weights.tensors,
            moved.base,
            moved.patches,
            moved.whole,
            scaling=form_of(manifest).scaling(manifest),
        )
        # The copy moved on from the skipped version, which the engine does not serve.
        update = update if after is None else merged_update(after, update)
        return manifest, self.prepare(update)

    def _compare(
        self, fetched: FetchedWeights, read_back: ReadBack, names: list[str] | None, seconds: float
    ) -> None:
        self._verdict = compare_tensors(fetched, read_back, names, seconds)
