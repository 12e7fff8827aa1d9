"""The topic `dead`: only a topic's owner writes dead letters; otherwise an unreadable message of 1
MiB would be copied by every reader and after every restart.
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
"""Most original bytes in a dead letter, so that none is larger than a record may be."""
KEY_CHARACTERS_MAX = 200  # of the original key, which is the dead letter's key too


class DeadLetterWriter:
    """One thread, for the topic's owner: the trainer owns admissions, trajectories and annotations,
    dispatch the other topics.
    """

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus, self._topic = bus, topic
        self._appended_to: dict[int, int] | None = None  # highest offset, by partition

    def append(self, unreadable: Sequence[tuple[Message, str]]) -> None:
        """Appends all but what an earlier call or process appended. The messages of a partition
        must be in ascending order.
        """
        if not unreadable:
            return
        # A restarted owner reads part of the topic again. A partition's dead letters are in the
        # order of its offsets, so offsets up to the highest one in `dead` are skipped.
        if self._appended_to is None:
            self._appended_to = self._read_appended()
        appended_to = dict(self._appended_to)
        entries: list[KeyedRecord] = []
        for message, reason in unreadable:
            if message.offset > appended_to.get(message.partition, -1):
                entries.append(_dead_letter(message, reason))
                appended_to[message.partition] = message.offset
        self._appended_to = None  # if the append fails, the next call reads `dead` again
        if entries:
            publish_all(self._bus, DEAD, entries)
        self._appended_to = appended_to

    def _read_appended(self) -> dict[int, int]:
        ends, appended_to = self._bus.end(self._topic), dict[int, int]()
        for dead in DeadLetterReader(self._bus, (self._topic,)).read():
            # A dead letter beyond the topic's end is another program's: later unreadable messages
            # would be skipped.
            if dead.source == self._topic and dead.offset < ends.get(dead.partition, 0):
                before = appended_to.get(dead.partition, -1)
                appended_to[dead.partition] = max(dead.offset, before)
        return appended_to


class DeadLetterReader:
    """`is_whole` is True while the reader has missed none that expired. A run of release 0.1.0 has
    a topic `<topic>.dead` for each topic; those of the given `topics` are read too.
    """

    def __init__(self, bus: Bus, topics: Iterable[str]) -> None:
        self._bus, self._positions = bus, dict[str, dict[int, int]]()
        for name in (DEAD, *(f"{topic}.{DEAD}" for topic in topics)):
            with suppress(TopicMissing):
                self._positions[name] = dict(bus.begin(name))
        firsts = [first for begin in self._positions.values() for first in begin.values()]
        self.is_whole = bool(firsts) and not any(firsts)

    def read(self) -> Iterator[Dead]:
        for name, positions in self._positions.items():
            stop = self._bus.end(name)
            while any(at < stop[p] for p, at in positions.items()):
                try:
                    messages = self._bus.read(name, positions)
                except PositionLost:  # the next messages expired meanwhile
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
