"""Publishes a rollout's records beside decoding: over a network an acknowledgement takes longer
than one poll of the engine.

Records of one topic stay in order. Queued records die with the process, as tokens that the engine
has not emitted yet do; a caller may rely on a record only after `then` has received its address.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.streams.bus import Bus
from rollstream.streams.values import Address
from rollstream.streams.writer import KeyedRecord, publish_all

log = logging.getLogger(__name__)

RECORDS_MAX = 1024  # queued; `send` blocks above this
GATHER_S = 0.1  # between two rounds: records sent meanwhile share an append

OnPublished = Callable[[list[Address]], None]


class RecordSender(Protocol):
    def send(
        self, topic: str, records: Sequence[KeyedRecord], on_published: OnPublished | None = None
    ) -> None:
        """Publish the records in this order; `then` gets their addresses once they are durable."""
        ...

    def flush(self) -> None:
        """Return when everything sent is durable."""
        ...


@dataclass(frozen=True, slots=True)
class _QueuedRecords:
    topic: str
    records: Sequence[KeyedRecord]
    on_published: OnPublished | None


class BackgroundSender:
    """A sender with its own thread. A failure in the thread is raised by the next call."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._changed = threading.Condition()
        self._waiting: list[_QueuedRecords] = []
        self._under_way: list[_QueuedRecords] = []
        self._failed: BaseException | None = None
        self._hurried = threading.Event()
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def send(
        self, topic: str, records: Sequence[KeyedRecord], on_published: OnPublished | None = None
    ) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._count() < RECORDS_MAX)
            self._check()
            self._waiting.append(_QueuedRecords(topic, records, on_published))
            self._changed.notify_all()

    def flush(self) -> None:
        self._hurried.set()
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._count())
            self._check()
        self._hurried.clear()

    def _count(self) -> int:
        return sum(len(letter.records) for letter in (*self._waiting, *self._under_way))

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    self._under_way, self._waiting = self._waiting, []
                self._post(self._under_way)
                with self._changed:
                    self._under_way = []
                    self._changed.notify_all()
                self._hurried.wait(GATHER_S)
        except Exception as error:
            log.exception("the rollout's records cannot be published")
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _post(self, letters: Sequence[_QueuedRecords]) -> None:
        """Publish with one append per topic."""
        by_topic: dict[str, list[_QueuedRecords]] = {}
        for letter in letters:
            by_topic.setdefault(letter.topic, []).append(letter)
        for topic, together in by_topic.items():
            records = [record for letter in together for record in letter.records]
            addresses = publish_all(self._bus, topic, records)
            for letter in together:
                count = len(letter.records)
                if letter.on_published is not None:
                    letter.on_published(addresses[:count])
                addresses = addresses[count:]
