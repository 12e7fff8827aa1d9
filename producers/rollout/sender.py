"""Appends a rollout's records beside its loop (`BackgroundSender`)."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.values import Address
from rollstream.streams.writer import KeyedRecord, append_encoded, encode_each

log = logging.getLogger(__name__)

RECORDS_MAX = 1024  # `send` waits while so many records are queued or being appended
GATHER_S = 0.1  # pause between two rounds: records sent meanwhile share an append

OnPublished = Callable[[list[Address]], None]
"""Receives the addresses of the records once they are durable, in the sender's thread."""
OnRefused = Callable[[int, str], None]
"""Gets the index of a record that the log cannot hold, and the reason, in the sender's thread. The
others, and `on_published`, continue without it.
"""


class RecordSender(Protocol):
    def send(
        self,
        topic: str,
        records: Sequence[KeyedRecord],
        on_published: OnPublished | None = None,
        is_urgent: bool = False,
        on_refused: OnRefused | None = None,
    ) -> None:
        """Records become durable later, in order. Urgent ones are not held back to share an append.
        A record that cannot be encoded, or is too large, is refused.
        """
        ...

    def flush(self) -> None:
        """Returns when all records sent before are durable."""
        ...


@dataclass(frozen=True, slots=True)
class _QueuedRecords:
    topic: str
    records: Sequence[KeyedRecord]
    on_published: OnPublished | None
    on_refused: OnRefused | None


class BackgroundSender:
    """If an append fails, the thread ends, and every later `send` or `flush` raises its error.

    A caller relies on a record only after `on_published`.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._changed = threading.Condition()
        self._waiting: list[_QueuedRecords] = []
        self._under_way: list[_QueuedRecords] = []
        self._failed: BaseException | None = None
        self._is_flushing = self._has_urgent = False
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def send(
        self,
        topic: str,
        records: Sequence[KeyedRecord],
        on_published: OnPublished | None = None,
        is_urgent: bool = False,
        on_refused: OnRefused | None = None,
    ) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._count() < RECORDS_MAX)
            self._check()
            self._waiting.append(_QueuedRecords(topic, records, on_published, on_refused))
            self._has_urgent = self._has_urgent or is_urgent
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed or not self._count())
            self._is_flushing = False
            self._check()

    def _count(self) -> int:
        return sum(len(queued.records) for queued in (*self._waiting, *self._under_way))

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    self._under_way, self._waiting = self._waiting, []
                    self._has_urgent = False
                self._post(self._under_way)
                with self._changed:
                    self._under_way = []
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: self._is_flushing or self._has_urgent, timeout=GATHER_S
                    )
        except Exception as error:
            log.exception("the rollout's records cannot be published")
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _post(self, batches: Sequence[_QueuedRecords]) -> None:
        by_topic: dict[str, list[_QueuedRecords]] = {}
        for queued in batches:
            by_topic.setdefault(queued.topic, []).append(queued)
        for topic, together in by_topic.items():
            encoded = [self._encoded(queued) for queued in together]
            addresses = append_encoded(self._bus, topic, [e for part in encoded for e in part])
            for queued, entries in zip(together, encoded, strict=True):
                count = len(entries)
                if queued.on_published is not None and count:
                    queued.on_published(addresses[:count])
                addresses = addresses[count:]

    def _encoded(self, queued: _QueuedRecords) -> list[AppendEntry]:
        entries, refused = encode_each(self._bus, queued.topic, queued.records)
        for index, reason in refused.items():
            log.error("a record of %s is refused: %s", queued.topic, reason)
            if queued.on_refused is not None:
                queued.on_refused(index, reason)
        return entries
