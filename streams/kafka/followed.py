"""Following topics: one consumer for all that a process follows, one thread that keeps asking.

A role looks at its topics many times a second. Here a look is a look into memory: one fetch, held
by the broker until something comes, covers every followed topic. Whoever is not served here (a
position behind what was handed out already, a second reader of a topic, an error) reads with a
cursor of its own (`cursor.py`), which also finds out what is wrong. A position that was truncated
ends the feed of its topic alone: the other feeds and the consumer stay as they are.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from streams.bus import Message
from streams.deadline import Deadline
from streams.kafka.client import Consumer, KafkaError, OutOfRange

log = logging.getLogger(__name__)

# After an answer nobody asks before some reader has looked, so who looks once a second is fetched
# for once a second; nor before `PAUSE_S`, so that what comes meanwhile comes together.
ASK_S = 0.5  # one poll; also how long a topic that is new here may wait for its first fetch
PAUSE_S = 0.05
RECORDS_MAX = 10_000
WAITING_BYTES_MAX = 8 << 20  # of one topic; it is fetched again when its reader has caught up
UNUSED_S = 10.0  # after which a feed that nobody asks for is dropped
TAKEN_S = 1.0  # after its last use another reader may have a feed begin elsewhere
RESTED_S = 1.0  # after an error


@dataclass(slots=True, eq=False)
class _Feed:
    """One topic: `at` is where each partition goes on for its reader, `end` behind what waits."""

    at: dict[int, int]
    end: dict[int, int]
    used_s: float
    waiting: dict[int, deque[Message]] = field(default_factory=dict[int, deque[Message]])
    bytes: int = 0
    lost: OutOfRange | None = None
    """Why nothing more comes; what waits is handed out first."""

    def add(self, message: Message) -> None:
        self.waiting.setdefault(message.partition, deque()).append(message)
        self.end[message.partition] = message.offset + 1
        self.bytes += _size(message)

    def may_grow(self) -> bool:
        return self.lost is None and self.bytes < WAITING_BYTES_MAX

    def goes_on(self, positions: Mapping[int, int]) -> bool:
        """Whether its reader is there or further on, in the same partitions."""
        return self.at.keys() == positions.keys() and all(
            offset >= self.at[p] for p, offset in positions.items()
        )

    def take(self, positions: Mapping[int, int], records_max: int, bytes_max: int) -> list[Message]:
        """What waits from there on, partition after partition."""
        taken: list[Message] = []
        for partition, offset in positions.items():
            waiting = self.waiting.get(partition, ())
            while waiting and len(taken) < records_max:
                message = waiting[0]
                if message.offset >= offset:
                    bytes_max -= _size(message)
                    if bytes_max < 0 and taken:
                        return taken
                    taken.append(message)
                self.bytes -= _size(message)
                waiting.popleft()
                self.at[partition] = message.offset + 1
            self.at[partition] = max(self.at[partition], offset)
        return taken


class Followed:
    """Threads share it; the consumer belongs to the thread that asks."""

    def __init__(self, make: Callable[[int], Consumer]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._feeds: dict[str, _Feed] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._looks = self._waiting = 0
        self.restarts = 0
        """Of the consumer, each after an error that names no position."""
        self.lost = 0
        """Feeds that ended as their position was truncated."""

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        records_max: int,
        bytes_max: int,
        wait_s: float,
    ) -> list[Message] | None:
        """See `Bus.read`, not exact; None for who has to read with a cursor. `OutOfRange` where a
        position lies outside of the topic.
        """
        deadline = Deadline(wait_s)
        with self._changed:
            if not self._admit(topic, positions):
                return None
            while True:
                feed = self._feeds.get(topic)
                if feed is None or not feed.goes_on(positions):  # an error, or another reader
                    return None
                messages = feed.take(positions, records_max, bytes_max)
                if feed.lost is not None and not messages:
                    del self._feeds[topic]
                    raise feed.lost
                if messages or deadline.passed():
                    self._looks += 1
                    self._changed.notify_all()
                    return messages
                self._waiting += 1
                self._changed.wait(deadline.remaining_s())
                self._waiting -= 1

    def close(self) -> None:
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(2 * ASK_S + 5.0)

    def _admit(self, topic: str, positions: Mapping[int, int]) -> bool:
        """Whether this reader has the topic's feed; a feed that nobody used for a while is free."""
        now_s, feed = time.monotonic(), self._feeds.get(topic)
        if feed is None or not feed.goes_on(positions):
            if feed is not None and feed.lost is None and now_s - feed.used_s < TAKEN_S:
                return False
            self._feeds[topic] = feed = _Feed(dict(positions), dict(positions), now_s)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="following", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        feed.used_s = now_s
        return True

    def _run(self) -> None:
        while not self._closed:
            try:
                self._follow(self._make(int(1000 * ASK_S)))
            except (KafkaError, OSError, OutOfRange) as error:
                log.info("the consumer of followed topics restarts: %s", error)
                self._rest()
            except Exception:
                log.exception("the consumer of followed topics restarts")
                self._rest()

    def _follow(self, consumer: Consumer) -> None:
        reading: dict[str, _Feed] = {}
        try:
            while not self._closed:
                feeds = self._fed()
                if feeds != reading:
                    _place(consumer, feeds, reading)
                    reading = feeds
                try:
                    messages = consumer.poll(ASK_S, RECORDS_MAX)
                except OutOfRange as error:
                    self._end_lost(error, reading)
                    continue
                if messages:
                    self._hand_over(messages, reading)
                    time.sleep(PAUSE_S)
                    self._await_look()
        finally:
            consumer.close()

    def _fed(self) -> dict[str, _Feed]:
        """The feeds that may grow now; one that nobody asks for is dropped."""
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                self._feeds = {t: f for t, f in self._feeds.items() if now_s - f.used_s < UNUSED_S}
                fed = {t: f for t, f in self._feeds.items() if f.may_grow()}
                if fed:
                    return fed
                self._changed.wait(ASK_S)
        return {}

    def _hand_over(self, messages: list[Message], reading: Mapping[str, _Feed]) -> None:
        with self._changed:
            for message in messages:
                if (feed := reading.get(message.topic)) is not None:
                    feed.add(message)
            self._changed.notify_all()

    def _await_look(self) -> None:
        with self._changed:
            looks = self._looks
            self._changed.wait_for(
                lambda: self._waiting or self._looks != looks or self._closed, ASK_S
            )

    def _end_lost(self, error: OutOfRange, reading: Mapping[str, _Feed]) -> None:
        """End the feeds of the places that the error names; without one the consumer restarts."""
        ended = [reading[topic] for topic in {t for t, _ in error.places} if topic in reading]
        if not ended:
            raise error
        with self._changed:
            for feed in ended:
                feed.lost = error
            self.lost += len(ended)
            self._changed.notify_all()

    def _rest(self) -> None:
        """Readers turn to cursors, which meet the error themselves, and come back after it."""
        with self._changed:
            self.restarts += 1
            self._feeds.clear()
            self._changed.notify_all()
        time.sleep(RESTED_S)


def _place(consumer: Consumer, feeds: Mapping[str, _Feed], reading: Mapping[str, _Feed]) -> None:
    """Let the consumer read these feeds, those that it did not read from their ends on."""
    consumer.assign([(topic, p) for topic, feed in feeds.items() for p in feed.at])
    for topic, feed in feeds.items():
        if reading.get(topic) is not feed:
            for partition, offset in feed.end.items():
                consumer.seek((topic, partition), offset)


def _size(message: Message) -> int:
    return len(message.key) + len(message.value or b"")
