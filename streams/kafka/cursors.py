"""Reads Kafka at explicit positions. A `Cursor` keeps a consumer and its unread records, which a
seek would drop: a read that begins where the previous one ended fetches nothing twice.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rollstream.deadline import Deadline
from rollstream.errors import BusTimeout
from rollstream.streams.bus import Bus, Message
from rollstream.streams.bus_checks import check_position
from rollstream.streams.kafka.client import Consumer
from rollstream.streams.kafka.refusals import OffsetOutOfRange

SLICE_S = 0.5  # longest single wait for a fetch; then a read with `answer_s` asks for the end
RECORDS_MAX = 100_000  # more records than one response holds


class Cursor:
    """For one thread at a time. Unreturned records stay in the cursor: those of two responses at
    most.
    """

    def __init__(self, bus: Bus, topic: str, consumer: Consumer) -> None:
        # Begins and ends are looked up over the bus's own connection: the consumer's may be busy
        # with a long wait for a response.
        self._bus = bus
        self._topic = topic
        self._consumer = consumer
        self._next: dict[int, int] = {}  # next offset after the last read, by partition
        self._pending: dict[int, deque[Message]] = {}

    def continues_at(self, positions: Mapping[int, int]) -> bool:
        return self._next == positions

    def read(
        self,
        positions: Mapping[int, int],
        records_max: int,
        bytes_max: int,
        wait_s: float,
        answer_s: float | None,
    ) -> list[Message]:
        """Reads as `Bus.read`. Before an empty result the brokers are asked for records; raises
        `BusTimeout` if there are but none arrives within `answer_s`. With `answer_s` None they are
        not asked, so an empty result does not show that there are none.
        """
        is_sequential = not self._seek(positions)
        deadline = Deadline(wait_s)
        while True:
            messages = self._take(positions, records_max, bytes_max)
            if messages:
                return messages
            if self._fetch(min(deadline.remaining_s(), SLICE_S), positions):
                if is_sequential:  # request the next response while the caller processes this one
                    self._fetch(0.0, positions)
            elif answer_s is None:
                if deadline.passed():
                    return []
            else:
                if self._is_at_end(positions):
                    if deadline.passed():
                        return []
                elif not self._fetch(answer_s, positions):
                    raise BusTimeout(
                        f"cannot read {self._topic!r}: the brokers have records there but sent "
                        f"none within {answer_s:g} s; check that all of them run"
                    )

    @property
    def consumer(self) -> Consumer:
        return self._consumer

    def close(self) -> None:
        self._consumer.close()

    def _seek(self, positions: Mapping[int, int]) -> bool:
        has_sought = False
        if self._next.keys() != positions.keys():
            self._consumer.assign([(self._topic, p) for p in positions])
            self._pending = {p: deque() for p in positions}
            self._next = {}
        for partition, offset in positions.items():
            if self._next.get(partition) != offset:
                self._consumer.seek((self._topic, partition), offset)
                self._pending[partition].clear()
                self._next[partition] = offset
                has_sought = True
        return has_sought

    def _take(
        self, positions: Mapping[int, int], records_max: int, bytes_max: int
    ) -> list[Message]:
        messages: list[Message] = []
        for partition in positions:
            pending = self._pending[partition]
            while pending and len(messages) < records_max:
                message = pending[0]
                bytes_max -= len(message.key) + len(message.value or b"")
                if bytes_max < 0 and messages:
                    return messages
                messages.append(pending.popleft())
                self._next[partition] = message.offset + 1
        return messages

    def _fetch(self, wait_s: float, positions: Mapping[int, int]) -> bool:
        try:
            # All fetched records are taken, so that a full partition does not starve the others.
            messages = self._consumer.poll(wait_s, RECORDS_MAX)
        except OffsetOutOfRange:
            check_kept(self._bus, self._topic, positions)
            return False  # the positions exist now: a partition's leader had been behind
        for message in messages:
            self._pending[message.partition].append(message)
        return bool(messages)

    def _is_at_end(self, positions: Mapping[int, int]) -> bool:
        ends = self._bus.end(self._topic)
        if any(ends[partition] < offset for partition, offset in positions.items()):
            check_kept(self._bus, self._topic, positions)
        return all(ends[partition] <= offset for partition, offset in positions.items())


def check_kept(bus: Bus, topic: str, positions: Mapping[int, int]) -> None:
    """Raises `PositionLost` before the first kept record, `BusError` beyond the end."""
    begins, ends = bus.begin(topic), bus.end(topic)
    for partition, offset in positions.items():
        check_position(topic, partition, offset, begins[partition], ends[partition])


PER_TOPIC_MAX = 2  # cursors that a pool keeps of one topic
CURSORS_MAX = 16  # cursors that a pool keeps in all


class CursorPool:
    """Lends a cursor to one thread at a time: the one whose last read ended at the positions, else
    a new one, or the least recently used of the topic if `PER_TOPIC_MAX` are kept.
    """

    def __init__(self, make: Callable[[str, Consumer | None], Cursor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[tuple[str, Cursor]] = []  # in order of last use, newest last

    @contextmanager
    def borrowed(self, topic: str, positions: Mapping[int, int]) -> Generator[Cursor]:
        """Yields the cursor; after an error it is closed, not kept."""
        cursor = self._borrow(topic, positions) or self._make(topic, self._spare_consumer())
        try:
            yield cursor
        except BaseException:
            cursor.close()
            raise
        for old in self._give_back(topic, cursor):
            old.close()

    def drop_topic(self, topic: str) -> None:
        with self._lock:
            gone = [cursor for name, cursor in self._free if name == topic]
            self._free = [free for free in self._free if free[0] != topic]
        for cursor in gone:
            cursor.close()

    def close(self) -> None:
        with self._lock:
            gone, self._free = self._free, []
        for _, cursor in gone:
            cursor.close()

    def _borrow(self, topic: str, positions: Mapping[int, int]) -> Cursor | None:
        with self._lock:
            mine = [free for free in self._free if free[0] == topic]
            exact = [free for free in mine if free[1].continues_at(positions)]
            if not exact and len(mine) < PER_TOPIC_MAX:
                return None
            chosen = (exact or mine)[0]
            self._free.remove(chosen)
            return chosen[1]

    def _spare_consumer(self) -> Consumer | None:
        # A new consumer costs connections and half a dozen requests.
        with self._lock:
            return self._free.pop(0)[1].consumer if len(self._free) >= CURSORS_MAX else None

    def _give_back(self, topic: str, cursor: Cursor) -> list[Cursor]:
        with self._lock:
            self._free.append((topic, cursor))
            mine = [free for free in self._free if free[0] == topic]
            surplus = mine[: max(0, len(mine) - PER_TOPIC_MAX)]
            rest = [free for free in self._free if free not in surplus]
            surplus += rest[: max(0, len(rest) - CURSORS_MAX)]
            self._free = [free for free in self._free if free not in surplus]
            return [cursor for _, cursor in surplus]
