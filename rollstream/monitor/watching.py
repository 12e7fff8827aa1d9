"""Reads a topic for monitoring: in order, without void records, and without any write.

A role sends undecodable bytes to `<topic>.dead` (`streams/reader.py`). The monitor only counts
them; otherwise each refresh would dead-letter them again. Reading may start in the middle of a
topic, because the whole log of an old run takes too long.
"""

from collections.abc import Mapping, Sequence

import msgspec

from rollstream.streams.bus import Bus, Message
from rollstream.errors import PositionLost
from rollstream.streams.judging import classify_message
from rollstream.streams.records import Fence, Opened, Record


class TimedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record and its append time in seconds since the epoch."""

    record: Record
    time_s: float


class TopicWatcher:
    """Reads one topic from `positions` on.

    `newest_s` is the append time of the newest message of any kind, None before the first;
    `unreadable` counts messages that do not decode to a record.
    """

    def __init__(self, bus: Bus, topic: str, positions: Mapping[int, int]) -> None:
        settings = bus.settings(topic)
        self.positions = dict(positions)
        self.newest_s: float | None = None
        self.unreadable = 0
        self._bus, self._topic = bus, topic
        self._fences = dict.fromkeys(positions, Fence())
        self._fenced, self._compacted = bool(settings.writer), settings.cleanup == "compact"
        self._first = 0  # rotates, so that a full partition does not starve the others

    def poll(self, records_max: int, *, exact: bool = True) -> list[TimedRecord]:
        """Returns the next records (`exact`: see `Bus.read`). If a position was truncated, reading
        continues at the topic's begin.
        """
        try:
            messages = self._bus.read(
                self._topic, self._offsets(), records_max=records_max, exact=exact
            )
        except PositionLost:
            self.positions = dict(self._bus.begin(self._topic))
            self._fences = dict.fromkeys(self.positions, Fence())
            return []
        return self._judge(messages)

    def is_behind(self, ends: Mapping[int, int]) -> bool:
        """True if a record below these end offsets is unread."""
        return any(offset < ends.get(p, 0) for p, offset in self.positions.items())

    def _offsets(self) -> dict[int, int]:
        partitions = list(self.positions)
        self._first = (self._first + 1) % max(1, len(partitions))
        turned = partitions[self._first :] + partitions[: self._first]
        return {partition: self.positions[partition] for partition in turned}

    def _judge(self, messages: Sequence[Message]) -> list[TimedRecord]:
        seen: list[TimedRecord] = []
        for message in messages:
            self.positions[message.partition] = message.offset + 1
            time_s = message.timestamp_ms / 1000
            self.newest_s = max(time_s, self.newest_s or time_s)
            if message.value is None:
                continue
            self._fences[message.partition], judged = classify_message(
                message.value,
                self._fences[message.partition],
                topic=self._topic,
                fenced=self._fenced,
                compacted=self._compacted,
            )
            self.unreadable += bool(judged.reason)
            record = judged.record
            if record is not None and not judged.void and not isinstance(record, Opened):
                seen.append(TimedRecord(record, time_s))
        return seen


def tail_positions(bus: Bus, topic: str, records_max: int) -> dict[int, int]:
    """Positions before the last `records_max` records, divided evenly among partitions."""
    begin, end = bus.begin(topic), bus.end(topic)
    share = max(1, records_max // max(1, len(end)))
    return {p: max(begin[p], last - share) for p, last in end.items()}


def positions_since(bus: Bus, topic: str, time_s: float) -> dict[int, int]:
    """Positions of the first records appended at or after `time_s`, by bisection.

    Append times in a partition may be slightly out of order: the position is as inexact as the
    writers' clocks.
    """
    begin, end = bus.begin(topic), bus.end(topic)
    return {p: _bisect(bus, topic, p, begin[p], end[p], time_s) for p in end}


def time_at(bus: Bus, topic: str, partition: int, offset: int) -> float | None:
    """Returns the append time of the first kept record from `offset` on; None without one."""
    try:
        messages = bus.read(topic, {partition: offset}, records_max=1)
    except PositionLost:
        return None
    return messages[0].timestamp_ms / 1000 if messages else None


def _bisect(bus: Bus, topic: str, partition: int, low: int, high: int, time_s: float) -> int:
    while low < high:
        middle = (low + high) // 2
        at_s = time_at(bus, topic, partition, middle)
        if at_s is not None and at_s < time_s:
            low = middle + 1
        else:
            high = middle
    return low
