"""The cursors that a bus keeps, so that each of its readers finds its own again.

A reader is recognised by its positions: the cursor that ended exactly there is its own. Otherwise a
new cursor is made, up to a bound. Beyond the bound the least recently used cursor of the topic is
moved, or the least recently used of another topic gives up its consumer: a new consumer costs
connections and half a dozen requests.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rollstream.streams.kafka.client import Consumer
from rollstream.streams.kafka.cursors import Cursor

PER_TOPIC_MAX = 2
CURSORS_MAX = 16


class CursorPool:
    """Threads share the pool; each cursor is lent to one of them at a time."""

    def __init__(self, make: Callable[[str, Consumer | None], Cursor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[tuple[str, Cursor]] = []  # in order of last use, newest last

    @contextmanager
    def borrowed(self, topic: str, positions: Mapping[int, int]) -> Generator[Cursor]:
        """The best cursor for a read at these positions. After an error it is closed, not kept."""
        cursor = self._borrow(topic, positions) or self._make(topic, self._spare_consumer())
        try:
            yield cursor
        except BaseException:
            cursor.close()
            raise
        for old in self._give_back(topic, cursor):
            old.close()

    def drop_topic(self, topic: str) -> None:
        """Close the topic's cursors: records that they fetched may have been truncated."""
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
        """The consumer of the least recently used cursor, once `CURSORS_MAX` are kept."""
        with self._lock:
            return self._free.pop(0)[1].consumer if len(self._free) >= CURSORS_MAX else None

    def _give_back(self, topic: str, cursor: Cursor) -> list[Cursor]:
        """Keep the cursor and return those above the bounds."""
        with self._lock:
            self._free.append((topic, cursor))
            mine = [free for free in self._free if free[0] == topic]
            surplus = mine[: max(0, len(mine) - PER_TOPIC_MAX)]
            rest = [free for free in self._free if free not in surplus]
            surplus += rest[: max(0, len(rest) - CURSORS_MAX)]
            self._free = [free for free in self._free if free not in surplus]
            return [cursor for _, cursor in surplus]
