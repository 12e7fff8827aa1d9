"""Writes and reads `dead`: bytes that are not a record of their topic, each appended once, by one
role.

Every reader of a topic meets the same unreadable bytes. Only the topic's owner appends them (the
trainer for admissions, trajectories and annotations; dispatch for the others); other readers only
count them. A restarted owner reads part of the topic again and skips each offset up to the highest
one in `dead`, because it appends in the order of each partition. Otherwise one unreadable record of
1 MiB would become a copy per reader and per restart.

A run of release 0.1.0 has a `<topic>.dead` for each topic. Its dead letters are read from there,
and new ones are appended to `dead`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from rollstream.errors import BusError, DecodeError, PositionLost, TopicMissing
from rollstream.streams.bus import Bus, Message
from rollstream.streams.codec import decode
from rollstream.streams.records import Dead
from rollstream.streams.topics import DEAD, DEAD_BYTES_EXTRA, RECORD_BYTES_MAX
from rollstream.streams.writer import KeyedRecord, publish_all

ORIGINAL_BYTES_MAX = RECORD_BYTES_MAX - DEAD_BYTES_EXTRA
"""Most original bytes that a dead letter keeps; the rest is cut off, so that no dead letter needs
the object store.
"""
KEY_CHARACTERS_MAX = 200


class DeadLetterWriter:
    """Appends the dead letters of one topic, each once, for the topic's owner. One thread only."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus, self._topic = bus, topic
        self._appended_to: dict[int, int] | None = None  # highest offset, by partition

    def append(self, unreadable: Sequence[tuple[Message, str]]) -> None:
        """Append these messages with their reasons, except those that an earlier call or process
        appended. The messages of a partition must be in its order.
        """
        if not unreadable:
            return
        if self._appended_to is None:
            self._appended_to = self._read_appended()
        appended_to = dict(self._appended_to)
        entries: list[KeyedRecord] = []
        for message, reason in unreadable:
            if message.offset > appended_to.get(message.partition, -1):
                entries.append(_dead_letter(message, reason))
                appended_to[message.partition] = message.offset
        self._appended_to = None  # in doubt until the append is acknowledged
        if entries:
            publish_all(self._bus, DEAD, entries)
        self._appended_to = appended_to

    def _read_appended(self) -> dict[int, int]:
        """The highest source offset with a dead letter, by partition. An offset beyond the topic's
        end comes from a foreign record and is ignored, or it would keep later dead letters out.
        """
        ends, appended_to = self._bus.end(self._topic), dict[int, int]()
        for dead in DeadLetterReader(self._bus, (self._topic,)).read():
            if dead.source == self._topic and dead.offset < ends.get(dead.partition, 0):
                before = appended_to.get(dead.partition, -1)
                appended_to[dead.partition] = max(dead.offset, before)
        return appended_to


class DeadLetterReader:
    """Reads the dead letters of all topics, from the oldest kept one on; for `topics` also those
    that release 0.1.0 wrote. `is_whole`: no dead letter expired before this reader read it.
    """

    def __init__(self, bus: Bus, topics: Iterable[str]) -> None:
        self._bus, self._positions = bus, dict[str, dict[int, int]]()
        for name in (DEAD, *(f"{topic}.{DEAD}" for topic in topics)):
            with suppress(TopicMissing):
                self._positions[name] = dict(bus.begin(name))
        firsts = [first for begin in self._positions.values() for first in begin.values()]
        self.is_whole = bool(firsts) and not any(firsts)

    def read(self) -> Iterator[Dead]:
        """Yields the dead letters up to the present ends, each one in one call only."""
        for name, positions in self._positions.items():
            stop = self._bus.end(name)
            while any(at < stop[p] for p, at in positions.items()):
                try:
                    messages = self._bus.read(name, positions)
                except PositionLost:  # expired meanwhile
                    self.is_whole = False
                    positions.update(self._bus.begin(name))
                    continue
                if not messages:
                    raise BusError(f"{name} ends before {stop}, its end a moment ago")
                for message in messages:
                    positions[message.partition] = message.offset + 1
                    dead = _dead_in(message)
                    if dead is not None:
                        yield dead


def _dead_letter(message: Message, reason: str) -> KeyedRecord:
    value = message.value or b""
    original = np.frombuffer(value[:ORIGINAL_BYTES_MAX], np.uint8)
    cut = len(value) if len(value) > ORIGINAL_BYTES_MAX else 0
    dead = Dead(message.topic, message.partition, message.offset, reason, original, cut)
    return message.key.decode(errors="replace")[:KEY_CHARACTERS_MAX], dead


def _dead_in(message: Message) -> Dead | None:
    try:
        record = None if message.value is None else decode(message.value).record
    except DecodeError:
        return None
    return record if isinstance(record, Dead) else None
