"""Appends over one idempotent producer for all threads. If an append fails midway, a partition
holds the first of its records up to some point, without a gap.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from rollstream.deadline import Deadline
from rollstream.errors import BusError, BusTimeout
from rollstream.streams.kafka.address import WhenFull
from rollstream.streams.kafka.admin import call_with_retries, closed_doors
from rollstream.streams.kafka.client import DELIVERY_S, KafkaError, Producer
from rollstream.streams.kafka.refusals import explain_error, is_permanent

log = logging.getLogger(__name__)


class ByteSemaphore:
    """To ask for more than `limit` is a programmer error."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._changed = threading.Condition()

    def take(self, amount: int, wait_s: float) -> bool:
        assert amount <= self.limit, f"{amount} bytes can never be taken of {self.limit}"
        deadline = Deadline(wait_s)
        with self._changed:
            while self.taken + amount > self.limit:
                if deadline.passed():
                    return False
                self._changed.wait(deadline.remaining_s())
            self.taken += amount
            return True

    def give_back(self, amount: int) -> None:
        with self._changed:
            self.taken -= amount
            self._changed.notify_all()


RecordToSend = tuple[int, bytes, bytes | None, int]
"""The partition, key, value and timestamp (ms) of one record."""

RECORD_COST_BYTES = 2_000  # memory of futures and batches per record
COPIES = 2  # the caller's value, and the batch that it is copied into
SLACK_S = 30.0  # waited beyond DELIVERY_S, when a living producer gives up by itself


def record_cost_bytes(record: RecordToSend) -> int:
    return RECORD_COST_BYTES + COPIES * (len(record[1]) + len(record[2] or b""))


def bounded_batches(records: Sequence[RecordToSend], limit: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, stop and cost (`record_cost_bytes`); a single record above `limit` is a batch
    of its own.
    """
    start = total = 0
    for index, record in enumerate(records):
        amount = record_cost_bytes(record)
        if index > start and total + amount > limit:
            yield start, index, total
            start, total = index, 0
        total += amount
    if records:
        yield start, len(records), total


# `finished` is called, and `done` set, once each record has succeeded or failed.
class _BatchInFlight:
    def __init__(self, count: int, finished: Callable[[], None]) -> None:
        self.offsets = [0] * count
        self.error: Exception | None = None
        self.done = threading.Event()
        self._left = count
        self._finished = finished
        self._lock = threading.Lock()

    def succeed(self, index: int, offset: int) -> None:
        self.offsets[index] = offset
        self._count(1)

    def fail(self, error: Exception, count: int = 1) -> None:
        self.error = self.error or error
        self._count(count)

    def _count(self, count: int) -> None:
        with self._lock:
            self._left -= count
            last = not self._left
        if last:
            self._finished()
            self.done.set()


class Appender:
    """Records in flight when a record fails are in doubt: the writer appends them again, and
    readers drop repeats. `bound` limits the bytes in flight; at the limit an append waits, or
    raises with nothing sent (`when_full`).
    """

    def __init__(
        self,
        where: str,
        make: Callable[[], Producer],
        bound: ByteSemaphore,
        when_full: WhenFull,
        answer_s: float,
        brokers: Callable[[], Sequence[tuple[str, int]]],
    ) -> None:
        self._where = where
        self._brokers = brokers
        self._make = make
        self._bound = bound
        self._when_full = when_full
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def append(self, topic: str, records: Sequence[RecordToSend]) -> list[int]:
        """Appends; returns the offsets once all are acknowledged. Raises `BusTimeout`, whose text
        states whether records are in doubt, and `BusError` if no producer could be created or the
        broker refuses the records.
        """
        offsets: list[int] = []
        # kafka-python's producer has no bound on the bytes in flight.
        for start, stop, amount in bounded_batches(records, self._bound.limit):
            amount = min(amount, self._bound.limit)
            self._take(topic, amount, bool(offsets))
            batch = self._send(topic, records[start:stop], amount)
            if not batch.done.wait(DELIVERY_S + SLACK_S):
                raise self._in_doubt(topic, "the client's thread has stopped")
            if batch.error is not None:
                raise self._failure(topic, batch.error) from batch.error
            offsets += batch.offsets
        return offsets

    def close(self, wait_s: float) -> None:
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            _close_producer(producer, wait_s)

    def _take(self, topic: str, amount: int, begun: bool) -> None:
        # Once a batch was sent (`begun`), an error would leave the append half done.
        wait_s = 0.0 if self._when_full == "raise" and not begun else DELIVERY_S
        if not self._bound.take(amount, wait_s):
            state = "the records before were appended" if begun else "nothing was sent"
            raise BusTimeout(
                f"cannot append to {topic!r} at {self._where}: {self._bound.taken} bytes are in "
                f"flight already, of {self._bound.limit} (in_flight_bytes), and the brokers do not "
                f"acknowledge them; {state}"
            )

    def _send(self, topic: str, records: Sequence[RecordToSend], amount: int) -> _BatchInFlight:
        batch = _BatchInFlight(len(records), lambda: self._bound.give_back(amount))
        try:
            producer = self._current(topic)
        except BusError as error:  # none could be made, so nothing was sent
            batch.fail(error, len(records))
            raise
        sent = 0
        try:
            for index, (partition, key, value, timestamp_ms) in enumerate(records):
                producer.send(
                    (topic, partition),
                    (key, value),
                    timestamp_ms,
                    lambda offset, index=index: batch.succeed(index, offset),
                    lambda error: self._failed(producer, batch, error),
                )
                sent += 1
        except (KafkaError, ValueError) as error:
            self._failed(producer, batch, error, len(records) - sent)
        return batch

    def _failed(
        self, producer: Producer, batch: _BatchInFlight, error: Exception, count: int = 1
    ) -> None:
        # Nothing later is sent: otherwise the log could lose a writer's record with sequence number
        # 5 and store number 6, a gap, which stops every reader (invariant 7).
        producer.abort()
        with self._lock:
            if self._producer is producer:
                self._producer = None
        batch.fail(error, count)

    def _current(self, topic: str) -> Producer:
        with self._lock:
            if self._producer is None:
                what = f"append to {topic!r} at {self._where} (nothing was sent)"
                self._producer = call_with_retries(what, self._answer_s, self._make, lambda _: None)
            return self._producer

    def _failure(self, topic: str, error: Exception) -> BusError:
        if not is_permanent(error):
            closed = closed_doors(self._brokers())
            unreached = f"; cannot be reached from here: {', '.join(closed)}" if closed else ""
            return self._in_doubt(topic, explain_error(error, topic) + unreached)
        return BusError(
            f"cannot append to {topic!r} at {self._where}: the broker refuses it "
            f"({explain_error(error, topic)})"
        )

    def _in_doubt(self, topic: str, why: str) -> BusTimeout:
        return BusTimeout(
            f"append to {topic!r} at {self._where} is in doubt ({why}): some of it may have been "
            "written; send it again, readers drop the repeat by its sequence number"
        )


def _close_producer(producer: Producer, wait_s: float) -> None:
    deadline = Deadline(wait_s)
    try:
        producer.close(deadline.remaining_s())
    except KafkaError as error:
        producer.abort()
        log.warning("the Kafka producer could not be closed within %g s: %s", wait_s, error)
