"""Measures how a process uses its run's log and store, with the guarantees of the wrapped, to
several threads too.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rollstream.errors import BusError, RecordTooLarge
from rollstream.metric_values import (
    SECONDS_BUCKETS,
    MetricHistogram,
    MetricValues,
    ProvidesMetrics,
)
from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.records import Position

LATENCY_BUCKETS = (0.001, 0.003, *SECONDS_BUCKETS)
"""Of single requests, in seconds."""


class _Durations:
    def __init__(self, operations: Sequence[str], timer: Callable[[], float]) -> None:
        self._timer = timer
        self._histograms = {operation: MetricHistogram(LATENCY_BUCKETS) for operation in operations}
        self.lock = threading.Lock()

    @contextmanager
    def timed(self, operation: str, counts: Counter[str] | None = None) -> Generator[Counter[str]]:
        started, more = self._timer(), Counter[str]()
        try:
            yield more
        finally:
            with self.lock:
                self._histograms[operation].add(self._timer() - started)
                # What the block counted is added in the same moment.
                if counts is not None:
                    counts.update(more)

    def histograms(self) -> dict[str, MetricHistogram]:
        # The caller has the lock.
        return {name: histogram.copy() for name, histogram in self._histograms.items()}


class MeteredBus(BusWrapper):
    """Appends, and requests for positions (begin, end, committed, commit), one exchange with a
    broker each. An append that raises is in doubt (`Bus.append`).
    """

    def __init__(self, below: Bus, timer: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(below)
        self._durations = _Durations(("append", "positions"), timer)
        self._in_doubt = 0
        self._appended: Counter[str] = Counter()
        self._read: Counter[str] = Counter()

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        try:
            with self._durations.timed("append", self._appended) as counted:
                offsets = self._below.append(topic, entries)
                counted[topic] = sum(len(entry.key) + len(entry.value or b"") for entry in entries)
        except RecordTooLarge:
            raise
        except BusError:
            self._in_doubt += 1
            raise
        return offsets

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        # Not timed: a read waits for new records.
        messages = self._below.read(
            topic,
            positions,
            records_max=records_max,
            bytes_max=bytes_max,
            wait_s=wait_s,
            exact=exact,
        )
        if messages:
            self._read[topic] += sum(
                len(message.key) + len(message.value or b"") for message in messages
            )
        return messages

    def begin(self, topic: str) -> dict[int, int]:
        with self._durations.timed("positions"):
            return self._below.begin(topic)

    def end(self, topic: str) -> dict[int, int]:
        with self._durations.timed("positions"):
            return self._below.end(topic)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        with self._durations.timed("positions"):
            self._below.commit(group, topic, positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        with self._durations.timed("positions"):
            return self._below.committed(group, topic)

    def metric_values(self) -> MetricValues:
        """Returns the metric values of this bus and the one below; thread-safe."""
        with self._durations.lock:
            seconds, appended = self._durations.histograms(), dict(self._appended)
        return {
            "bus_seconds": seconds,
            "bus_appended_bytes_total": appended,
            "bus_read_bytes_total": dict(self._read),
            "bus_in_doubt_total": self._in_doubt,
            "bus_retries_total": 0,
            **super().metric_values(),
        }


class MeteredStore:
    """A listing is timed until its first object."""

    def __init__(self, below: ObjectStore, timer: Callable[[], float] = time.perf_counter) -> None:
        self._below = below
        self._durations = _Durations(("write", "read", "stat", "list", "delete"), timer)
        self._bytes: Counter[str] = Counter(read=0, written=0)

    def put(self, key: str, data: Data) -> str:
        with self._writing(data):
            return self._below.put(key, data)

    def create(self, key: str, data: Data) -> str:
        with self._writing(data):
            return self._below.create(key, data)

    def swap(self, key: str, data: Data, etag: str) -> str:
        with self._writing(data):
            return self._below.swap(key, data, etag)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._durations.timed("read", self._bytes) as counted:
            content = self._below.get(key, start, end)
            counted["read"] = len(content)
        return content

    def stat(self, key: str) -> ObjectStat:
        with self._durations.timed("stat"):
            return self._below.stat(key)

    def read(self, key: str) -> tuple[bytes, str]:
        with self._durations.timed("read", self._bytes) as counted:
            content_etag = self._below.read(key)
            counted["read"] = len(content_etag[0])
        return content_etag

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self._listed(self._below.list(prefix))

    def delete(self, key: str) -> None:
        with self._durations.timed("delete"):
            self._below.delete(key)

    def delete_all(self, keys: Iterable[str]) -> None:
        with self._durations.timed("delete"):
            self._below.delete_all(keys)

    def metric_values(self) -> MetricValues:
        """Returns the metric values of this store and the one below; thread-safe."""
        below = self._below
        with self._durations.lock:
            seconds, sizes = self._durations.histograms(), dict(self._bytes)
        return {
            "store_seconds": seconds,
            "store_bytes_total": sizes,
            "store_in_doubt_total": 0,
            "store_retries_total": 0,
            **(below.metric_values() if isinstance(below, ProvidesMetrics) else {}),
        }

    def _listed(self, objects: Iterator[ListedObject]) -> Iterator[ListedObject]:
        with self._durations.timed("list"):
            first = next(objects, None)
        if first is not None:
            yield first
            yield from objects

    @contextmanager
    def _writing(self, data: Data) -> Generator[None]:
        with self._durations.timed("write", self._bytes) as counted:
            yield
            counted["written"] = memoryview(data).nbytes
