"""A `GroupReader` over Kafka's groups. A commit covers the polled records of partitions that the
member still holds; new owners read the others again.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from rollstream.deadline import Deadline
from rollstream.errors import BusError
from rollstream.streams.bus import Bus, Message
from rollstream.streams.bus_checks import check_position
from rollstream.streams.kafka.admin import call_with_retries
from rollstream.streams.kafka.client import LOST_MEMBERSHIP, Consumer, KafkaError
from rollstream.streams.kafka.refusals import (
    NoCommittedPosition,
    OffsetOutOfRange,
    explain_error,
)

JOIN_S = 0.02  # joining a group happens within polls, so each poll may take this long
COMMIT_S = 10.0  # how long a commit is retried through rebalances

T = TypeVar("T")


class KafkaGroupReader:
    """`make` returns a new client; `answer_s` bounds the retries of a request."""

    def __init__(
        self, bus: Bus, group: str, topic: str, make: Callable[[], Consumer], answer_s: float
    ) -> None:
        self._bus = bus
        self._group = group
        self._topic = topic
        self._make = make
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._read: dict[int, int] = {}  # by partition held, the offset after the polled records
        self._stored: dict[int, int] = {}  # by partition held, the offset committed by this member
        self._consumer: Consumer | None = None
        self._retry(self._joined_consumer)

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        deadline = Deadline(wait_s)
        if not records_max:
            self._retry(lambda: self._joined_consumer().heartbeat())
            return []
        while True:
            polled = self._retry(lambda: self._poll_once(deadline, records_max))
            # An administrator may have added partitions to the topic. The run does not use them.
            count = self._bus.partitions(self._topic)
            messages = [message for message in polled if message.partition < count]
            with self._lock:
                for message in messages:
                    self._read[message.partition] = message.offset + 1
            if messages or deadline.passed():
                return messages

    def commit(self, before: Mapping[int, int] | None = None) -> None:
        deadline = Deadline(COMMIT_S)
        while due := self._due(before or {}):
            assert self._consumer is not None, "records were read, so there is a client"
            try:
                self._consumer.commit(due, self._answer_s)
            except LOST_MEMBERSHIP:
                if deadline.passed():
                    return  # the next owner reads the records again
                self._retry(lambda: self._joined_consumer().heartbeat())  # drops revoked partitions
            except KafkaError as error:
                raise BusError(
                    f"cannot commit positions in {self._topic!r}: {explain_error(error)}"
                ) from error
            else:
                with self._lock:
                    self._stored |= due

    def pass_lost(self) -> dict[int, int]:
        return self._retry(self._pass_lost)

    def _pass_lost(self) -> dict[int, int]:
        consumer, begins = self._joined_consumer(), self._bus.begin(self._topic)
        at = self._next_offsets()
        lost = {
            p: begins[p] - at[p] for p in consumer.assignment() if p in at and at[p] < begins[p]
        }
        # While a group has members, Kafka accepts commits only from them: this member seeks itself,
        # and its next `commit` stores the new position.
        for partition in lost:
            consumer.seek((self._topic, partition), begins[partition])
        with self._lock:
            self._read |= {partition: begins[partition] for partition in lost}
        return lost

    def _next_offsets(self) -> dict[int, int]:
        committed = self._bus.committed(self._group, self._topic)
        with self._lock:
            return {p: at.offset for p, at in committed.items()} | self._read

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        self.drop_partitions([*self._read])

    def _due(self, before: Mapping[int, int]) -> dict[int, int]:
        with self._lock:
            ends = {p: min(at, before.get(p, at)) for p, at in self._read.items()}
            return {p: at for p, at in ends.items() if self._stored.get(p) != at}

    def _retry(self, once: Callable[[], T]) -> T:
        return call_with_retries(
            f"read {self._topic!r} as a group", self._answer_s, once, self._replace
        )

    def _poll_once(self, deadline: Deadline, records_max: int) -> list[Message]:
        consumer = self._joined_consumer()
        try:
            return consumer.poll(max(deadline.remaining_s(), JOIN_S), records_max)
        except NoCommittedPosition:
            self._start_uncommitted(consumer)
        except OffsetOutOfRange:
            self._check_commits(consumer)
        return []

    def _start_uncommitted(self, consumer: Consumer) -> None:
        committed, begins = (
            self._bus.committed(self._group, self._topic),
            self._bus.begin(self._topic),
        )
        for partition in consumer.assignment():
            if partition not in committed and partition not in self._read:
                consumer.seek((self._topic, partition), begins.get(partition, 0))

    def _check_commits(self, consumer: Consumer) -> None:
        begins, ends = self._bus.begin(self._topic), self._bus.end(self._topic)
        for p, offset in self._next_offsets().items():
            if p in consumer.assignment() and p in begins:
                check_position(self._topic, p, offset, begins[p], ends[p])

    def _joined_consumer(self) -> Consumer:
        if self._consumer is None:
            consumer = self._make()
            try:
                consumer.subscribe(self._topic, self.drop_partitions)
            except KafkaError:
                consumer.close()
                raise
            self._consumer = consumer
        return self._consumer

    def drop_partitions(self, partitions: Collection[int]) -> None:
        """Drops partitions that belong to another member now. The client calls this in its own
        thread.
        """
        with self._lock:
            for partition in partitions:
                self._read.pop(partition, None)
                self._stored.pop(partition, None)

    def _replace(self, error: Exception) -> None:
        if isinstance(error, KafkaError) and error.retriable:
            return
        with contextlib.suppress(KafkaError):  # it failed before
            self.close()
        self.drop_partitions([*self._read])
