"""Follows the `weights` topic and fetches versions beside generation, so that only the swap itself
stops decoding.

Only announced versions are fetched, and a version is announced after `latest.json` was swapped to
it (invariant 6). The tensors are in memory of this process. They are moved from version to version
in place, each compared with its hash, then prepared for the engine. After the swap a bounded sample
of them, which rotates through all tensors, is read back from the engine and compared. One thread
does one of these at a time, so the tensors do not change between `take` and the comparison.

A version that was fetched ahead of time and never served costs its engine nothing: its update is
merged with the next one, which is then still a patch of the served version.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rollstream.errors import CorruptObject, EngineRefused, ObjectMissing
from rollstream.metric_values import SECONDS_BUCKETS, MetricHistogram
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.publish import announcement
from rollstream.storage.weights.resident import ResidentUpdate, ResidentWeights, TensorPatch
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Opened, WeightsAnnounced
from rollstream.streams.release import check_readable_by
from rollstream.streams.values import Version

SAMPLE_BYTES = 32 << 20  # a tensor larger than this is a sample of its own
log = logging.getLogger(__name__)
FETCH_TRIES = 5
REPAIRS_MAX = 3  # in a row
ReadBack = Callable[[Iterable[str], Mapping[str, torch.Tensor]], WeightComparison]


def merged_update(first: WeightUpdate, then: WeightUpdate) -> WeightUpdate:
    """Return `then` as an update from the base of `first`, which was never served. Returns `then`
    unchanged if the two do not join.
    """
    if first.patches is None or then.patches is None or then.base != first.version:
        return then
    whole = tuple(dict.fromkeys((*first.whole, *then.whole)))
    by_name: dict[str, list[TensorPatch]] = {}
    for patch in (*first.patches, *then.patches):
        if patch.name not in whole:
            by_name.setdefault(patch.name, []).append(patch)
    patches = tuple(_merged_patch(parts, then.tensors) for parts in by_name.values())
    return replace(then, base=first.base, patches=patches, whole=whole, prepared=None)


def _merged_patch(parts: Sequence[TensorPatch], tensors: Mapping[str, torch.Tensor]) -> TensorPatch:
    """All elements that any of the patches changed, with their present values."""
    if len(parts) == 1:
        return parts[0]
    indices = torch.unique(torch.cat([patch.indices for patch in parts]))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return replace(parts[-1], indices=indices, values=tensors[parts[-1].name].view(-1)[indices])


class TensorRotation:
    """Each call continues after the last name of the previous one. The set of names may change
    between calls.
    """

    def __init__(self, sample_bytes: int = SAMPLE_BYTES) -> None:
        self._bytes = sample_bytes
        self._after = ""

    def next(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return at least one name, each at most once; in total at most `sample_bytes` unless one
        tensor alone is larger.
        """
        names = sorted(tensors)
        later = [name for name in names if name > self._after]
        found: list[str] = []
        room = self._bytes
        for name in later + names[: len(names) - len(later)]:
            room -= tensors[name].nbytes
            if found and room < 0:
                break
            found.append(name)
        self._after = found[-1] if found else ""
        return found


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """Verified tensors of one version, prepared for the engine. `repairs`: they replace tensors
    that the engine served wrongly.
    """

    announced: WeightsAnnounced
    update: WeightUpdate
    repairs: bool = False


@dataclass(frozen=True, slots=True)
class ReadBackResult:
    """The result of reading tensors back; the update took `seconds`."""

    fetched: FetchedWeights
    compared: WeightComparison
    seconds: float


class WeightsFollower:
    """Holds the newest announced version, and its tensors once they are fetched."""

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        timer: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._timer, self._sleep = store, timer, sleep
        self._reader = TopicReader(bus, "weights", from_begin(bus, "weights"), with_opened=True)
        self._held = ResidentWeights()
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
        """The engine's own preparation, set once there is an engine."""
        self.unavailable: Version | None = None
        """The version that `fetch_version` was called with last, if it could not be fetched."""
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
        """Note what was announced since the last call."""
        for received in self._reader.follow():
            record = received.record
            if isinstance(record, Opened):
                check_readable_by(record)
            if isinstance(record, WeightsAnnounced) and (
                self._newest is None or record.version > self._newest.version
            ):
                self._newest = record

    def prefetch(self, held: Version | None) -> None:
        """Start to fetch the newest version, unless it is held or another fetch is running or
        waiting.
        """
        newest = self._newest
        if newest is not None and newest.version != held and self._is_idle():
            self._begin(lambda: self._fetch(newest))

    def fetch_ahead(self, held: Version | None) -> None:
        """Like `prefetch`, for a rollout that cannot take the version yet: a waiting version is
        moved on to the newest one, still as a patch of the served version.
        """
        fetched, newest = self._fetched, self._newest
        if fetched is None:
            self.prefetch(held)
            return
        is_old = newest is not None and fetched.announced.version < newest.version
        if newest is not None and is_old and not self.is_busy():
            self._fetched = None
            self._begin(lambda: self._fetch(newest, after=fetched.update))

    def take(self) -> FetchedWeights | None:
        """Return the fetched version once; raises the error of a fetch that failed after its tries.
        Its tensors do not change until `compare` was called and gave its verdict, or until the next
        `prefetch`.
        """
        if self.is_busy():
            return None
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            self._taken = fetched.announced
        return fetched

    def compare(self, fetched: FetchedWeights, read_back: ReadBack, seconds: float) -> None:
        """Start to compare some tensors (all of them after a repair) with what the engine serves.
        The update took `seconds`.
        """
        names = None if fetched.repairs else self._rotation.next(fetched.update.tensors)
        self._is_comparing = True
        self._begin(lambda: self._compare(fetched, read_back, names, seconds))

    def verdict(self) -> ReadBackResult | None:
        """Return the result of the comparison once. After a mismatch the version is fetched again
        (`repair`), and `verified` stays False until all of it was compared.
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
        """Wait until a comparison that was started has its verdict; returns at once without one."""
        if self._is_comparing and self._thread is not None:
            self._thread.join()

    def repair(self, keep: bool) -> None:
        """Start to fetch the newest version into new memory, or with `keep` the version that was
        taken last; does nothing while a fetch runs. Raises `EngineRefused` after `REPAIRS_MAX`
        repairs in a row without success.
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
        self._held = ResidentWeights()
        self._begin(lambda: self._fetch(announced, or_newer=not keep))

    def fetch_version(self, version: Version) -> None:
        """Start to fetch this very version, which may be older than the newest one; does nothing
        while another fetch runs. If the version cannot be fetched, `unavailable` names it and no
        error is raised.
        """
        ahead = self._fetched
        if ahead is not None and not ahead.repairs and ahead.announced.version != version:
            self._fetched = None  # fetched ahead, and not needed now
        if self.unavailable != version and self._is_idle():
            self._begin(lambda: self._fetch_old(version))

    def is_busy(self) -> bool:
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
        """Retention may delete a version while it is fetched; with `or_newer` the newest version
        replaces it then. `after` is the update that was fetched before and never taken.
        """
        for attempt in range(FETCH_TRIES):
            started = self._timer()
            try:
                moved = self._held.update(self._store, announced.version, announced.manifest_hash)
            except (ObjectMissing, CorruptObject, OSError) as error:
                log.warning("version %s could not be fetched: %s", announced.version, error)
                newest = self._newest
                if or_newer and newest is not None and newest.version > announced.version:
                    announced = newest
                elif attempt == FETCH_TRIES - 1:
                    raise
                self._sleep(0.1 * 2**attempt)
                continue
            self.fetch_s.add(self._timer() - started)
            self.fetched_bytes += moved.fetched_bytes
            update = self._update_of(moved)
            update = update if after is None else merged_update(after, update)
            self._fetched = FetchedWeights(announced, self.prepare(update), self._repairing)
            return
        raise ObjectMissing(
            f"version {announced.version} and those before it were deleted while fetched"
        )

    def _fetch_old(self, version: Version) -> None:
        started = self._timer()
        try:
            moved = self._held.update(self._store, version)
        except (ObjectMissing, CorruptObject, OSError) as error:
            log.warning("version %s cannot be fetched from history: %s", version, error)
            self.unavailable = version
            return
        self.fetch_s.add(self._timer() - started)
        self.fetched_bytes += moved.fetched_bytes
        announced = announcement(moved.manifest, moved.manifest.created_s)
        self._fetched = FetchedWeights(announced, self.prepare(self._update_of(moved)))

    def _update_of(self, moved: ResidentUpdate) -> WeightUpdate:
        manifest, tensors = moved.manifest, self._held.tensors
        scaling = manifest.adapter.scaling if manifest.adapter else None
        return WeightUpdate(
            manifest.version, tensors, moved.base, moved.patches, moved.whole, scaling=scaling
        )

    def _compare(
        self, fetched: FetchedWeights, read_back: ReadBack, names: list[str] | None, seconds: float
    ) -> None:
        tensors = fetched.update.tensors
        compared = read_back(tensors if names is None else names, tensors)
        if compared.differing:
            log.error(
                "version %s: the engine does not serve what it was given (%d of %d tensors: %s); "
                "it serves nothing until all tensors were fetched again",
                fetched.announced.version,
                len(compared.differing),
                compared.count,
                ", ".join(compared.differing[:3]),
            )
        self._verdict = ReadBackResult(fetched, compared, seconds)


def compare_all_tensors(
    fetched: FetchedWeights,
    read_back: ReadBack,
    started_s: float,
    timer: Callable[[], float] = time.perf_counter,
) -> ReadBackResult:
    """Compare all tensors of the first version before anything is served. Raises `EngineRefused` if
    one differs from what the engine was given. `started_s` is a time of `timer`.
    """
    compared = read_back(fetched.update.tensors, fetched.update.tensors)
    if compared.differing:
        raise EngineRefused(
            f"weights: the engine does not serve {', '.join(compared.differing[:3])} of version "
            f"{fetched.announced.version} as given ({len(compared.differing)} of {compared.count})"
        )
    return ReadBackResult(fetched, compared, timer() - started_s)
