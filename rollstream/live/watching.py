"""Reading a topic as an onlooker: in order, void records passed over, and nothing ever written.

A role that meets bytes which are no record sends them to `<topic>.dead` (`streams/reader.py`); an
onlooker only counts them, or every look at a run would bury them again. It may begin in the middle
of a topic, because an old run's log is longer than anybody wants to wait for.
"""

from collections.abc import Mapping, Sequence

import msgspec

from streams.bus import Bus, Message
from streams.errors import PositionLost
from streams.judging import judge
from streams.records import Fence, Opened, Record


class Seen(msgspec.Struct, frozen=True, gc=False):
    """A record and when it was appended, in seconds since the epoch."""

    record: Record
    time_s: float


class Watcher:
    """One onlooker of one topic from `positions` on.

    `newest_s` is the time of the newest record of any kind, None before the first; `unreadable`
    counts bytes that are no record.
    """

    def __init__(self, bus: Bus, topic: str, positions: Mapping[int, int]) -> None:
        settings = bus.settings(topic)
        self.positions = dict(positions)
        self.newest_s: float | None = None
        self.unreadable = 0
        self._bus, self._topic = bus, topic
        self._fences = dict.fromkeys(positions, Fence())
        self._fenced, self._compacted = bool(settings.writer), settings.cleanup == "compact"
        self._first = 0  # rotates, so that no partition waits behind a full one

    def poll(self, records_max: int, *, exact: bool = True) -> list[Seen]:
        """The next records (`exact`: see `Bus.read`); a position that was truncated away goes on at
        the begin.
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
        """Whether something below these offsets is still unread."""
        return any(offset < ends.get(p, 0) for p, offset in self.positions.items())

    def _offsets(self) -> dict[int, int]:
        partitions = list(self.positions)
        self._first = (self._first + 1) % max(1, len(partitions))
        turned = partitions[self._first :] + partitions[: self._first]
        return {partition: self.positions[partition] for partition in turned}

    def _judge(self, messages: Sequence[Message]) -> list[Seen]:
        seen: list[Seen] = []
        for message in messages:
            self.positions[message.partition] = message.offset + 1
            time_s = message.timestamp_ms / 1000
            self.newest_s = max(time_s, self.newest_s or time_s)
            if message.value is None:
                continue
            self._fences[message.partition], judged = judge(
                message.value,
                self._fences[message.partition],
                topic=self._topic,
                fenced=self._fenced,
                compacted=self._compacted,
            )
            self.unreadable += bool(judged.reason)
            record = judged.record
            if record is not None and not judged.void and not isinstance(record, Opened):
                seen.append(Seen(record, time_s))
        return seen


def tail_of(bus: Bus, topic: str, records_max: int) -> dict[int, int]:
    """Positions before the last `records_max` records, divided evenly among partitions."""
    begin, end = bus.begin(topic), bus.end(topic)
    share = max(1, records_max // max(1, len(end)))
    return {p: max(begin[p], last - share) for p, last in end.items()}


def since(bus: Bus, topic: str, time_s: float) -> dict[int, int]:
    """Positions of the first records appended at or after `time_s`, by bisection.

    Times within a partition need to grow only roughly: where clocks of writers differ, so does
    the place by as much.
    """
    begin, end = bus.begin(topic), bus.end(topic)
    return {p: _bisect(bus, topic, p, begin[p], end[p], time_s) for p in end}


def time_at(bus: Bus, topic: str, partition: int, offset: int) -> float | None:
    """When the record at this offset, or the next one kept, was appended; None if there is none."""
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
