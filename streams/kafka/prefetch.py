"""One consumer and one thread read all followed topics: a poll only reads memory. A reader that
cannot be served here reads with a cursor (`cursors.py`), which also reports the error.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollstream.deadline import Deadline
from rollstream.streams.bus import Message
from rollstream.streams.kafka.client import Consumer, KafkaError
from rollstream.streams.kafka.refusals import OffsetOutOfRange

log = logging.getLogger(__name__)

# After a response the next fetch waits until a reader has polled, so a topic that is read once a
# second is fetched once a second; and it waits `PAUSE_S`, so that records arrive in batches.
POLL_S = 0.5  # one poll; also how long a topic that is new here may wait for its first fetch
PAUSE_S = 0.05
RECORDS_MAX = 10_000
WAITING_BYTES_MAX = 8 << 20  # of one topic; at this bound its reader must take some first
UNUSED_S = 10.0  # a feed without a reader is dropped after this time
IN_USE_S = 1.0  # for this long after its last use a feed belongs to its reader
RESTART_PAUSE_S = 1.0  # pause after an error


@dataclass(slots=True, eq=False)
class _TopicBuffer:
    """`at` is the reader's next offset by partition, `end` the offset after the last fetched
    record.
    """

    at: dict[int, int]
    end: dict[int, int]
    used_s: float
    waiting: dict[int, deque[Message]] = field(default_factory=dict[int, deque[Message]])
    bytes: int = 0
    lost: OffsetOutOfRange | None = None
    """Set when the position was truncated; records fetched before are handed out first."""

    def add(self, message: Message) -> None:
        self.waiting.setdefault(message.partition, deque()).append(message)
        self.end[message.partition] = message.offset + 1
        self.bytes += _size(message)

    def may_grow(self) -> bool:
        return self.lost is None and self.bytes < WAITING_BYTES_MAX

    def continues_at(self, positions: Mapping[int, int]) -> bool:
        """Whether the positions are in exactly the reader's partitions, at its offsets or after
        them.
        """
        return self.at.keys() == positions.keys() and all(
            offset >= self.at[p] for p, offset in positions.items()
        )

    def take(self, positions: Mapping[int, int], records_max: int, bytes_max: int) -> list[Message]:
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


class PrefetchConsumer:
    """Reads followed topics; threads share it, and only its own thread uses the consumer. A
    truncated position ends only the feed of its own topic.
    """

    def __init__(self, make: Callable[[int], Consumer]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._feeds: dict[str, _TopicBuffer] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._polls = self._waiting = 0
        self.restarts = 0
        """Restarts of the consumer, each after an error that names no position."""
        self.lost = 0
        """Feeds that ended because their position was truncated."""

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        records_max: int,
        bytes_max: int,
        wait_s: float,
    ) -> list[Message] | None:
        """Reads as `Bus.read` with `exact=False`; None if the reader has to use a cursor. Raises
        `OffsetOutOfRange`.
        """
        deadline = Deadline(wait_s)
        with self._changed:
            if not self._acquire_feed(topic, positions):
                return None
            while True:
                feed = self._feeds.get(topic)
                if feed is None or not feed.continues_at(positions):  # an error, or another reader
                    return None
                messages = feed.take(positions, records_max, bytes_max)
                if feed.lost is not None and not messages:
                    del self._feeds[topic]
                    raise feed.lost
                if messages or deadline.passed():
                    self._polls += 1
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
            thread.join(2 * POLL_S + 5.0)

    def _acquire_feed(self, topic: str, positions: Mapping[int, int]) -> bool:
        now_s, feed = time.monotonic(), self._feeds.get(topic)
        if feed is None or not feed.continues_at(positions):
            if feed is not None and feed.lost is None and now_s - feed.used_s < IN_USE_S:
                return False
            self._feeds[topic] = feed = _TopicBuffer(dict(positions), dict(positions), now_s)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        feed.used_s = now_s
        return True

    def _run(self) -> None:
        while not self._closed:
            try:
                self._follow(self._make(int(1000 * POLL_S)))
            except (KafkaError, OSError, OffsetOutOfRange) as error:
                log.info("prefetch consumer restarted: %s", error)
                self._drop_and_pause()
            except Exception:
                log.exception("prefetch consumer restarted")
                self._drop_and_pause()

    def _follow(self, consumer: Consumer) -> None:
        reading: dict[str, _TopicBuffer] = {}
        try:
            while not self._closed:
                feeds = self._wait_for_growing()
                if feeds != reading:
                    _assign(consumer, feeds, reading)
                    reading = feeds
                try:
                    messages = consumer.poll(POLL_S, RECORDS_MAX)
                except OffsetOutOfRange as error:
                    self._end_lost(error, reading)
                    continue
                if messages:
                    self._store(messages, reading)
                    time.sleep(PAUSE_S)
                    self._wait_for_poll()
        finally:
            consumer.close()

    def _wait_for_growing(self) -> dict[str, _TopicBuffer]:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                # A lost one stays until its reader takes the error, so that a loss counts once.
                self._feeds = {
                    t: f
                    for t, f in self._feeds.items()
                    if f.lost is not None or now_s - f.used_s < UNUSED_S
                }
                growing = {t: f for t, f in self._feeds.items() if f.may_grow()}
                if growing:
                    return growing
                self._changed.wait(POLL_S)
        return {}

    def _store(self, messages: list[Message], reading: Mapping[str, _TopicBuffer]) -> None:
        with self._changed:
            for message in messages:
                if (feed := reading.get(message.topic)) is not None:
                    feed.add(message)
            self._changed.notify_all()

    def _wait_for_poll(self) -> None:
        with self._changed:
            polls = self._polls
            self._changed.wait_for(
                lambda: self._waiting or self._polls != polls or self._closed, POLL_S
            )

    def _end_lost(self, error: OffsetOutOfRange, reading: Mapping[str, _TopicBuffer]) -> None:
        ended = [reading[topic] for topic in {t for t, _ in error.places} if topic in reading]
        if not ended:
            raise error
        with self._changed:
            for feed in ended:
                feed.lost = error
            self.lost += len(ended)
            self._changed.notify_all()

    def _drop_and_pause(self) -> None:
        with self._changed:
            self.restarts += 1
            # Readers fall back to cursors, which raise the error themselves; later reads begin new
            # feeds.
            self._feeds.clear()
            self._changed.notify_all()
        time.sleep(RESTART_PAUSE_S)


def _assign(
    consumer: Consumer, feeds: Mapping[str, _TopicBuffer], reading: Mapping[str, _TopicBuffer]
) -> None:
    consumer.assign([(topic, p) for topic, feed in feeds.items() for p in feed.at])
    for topic, feed in feeds.items():
        if reading.get(topic) is not feed:
            for partition, offset in feed.end.items():
                consumer.seek((topic, partition), offset)


def _size(message: Message) -> int:
    return len(message.key) + len(message.value or b"")
