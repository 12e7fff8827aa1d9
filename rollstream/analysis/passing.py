"""What `tail` reads: a topic's messages in the order of their times, judged but never changed.

It joins no consumer group and buries nothing: bytes that are no record are shown as such, records
below the fence of invariant 7 as void. Where no log is left the archive's rows pass instead.
"""

import heapq
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.analysis.fields import Condition, asked_of, values_of
from rollstream.analysis.shown import plain
from streams.bus import Bus, Message
from streams.errors import PositionLost, SequenceGap
from streams.judging import Judgement, judge
from streams.records import Fence, Record

WAIT_S = 0.25  # between two looks at Ctrl-C


@dataclass(frozen=True, slots=True)
class Passing:
    """One record on its way, or why it is none (`reason`)."""

    partition: int
    offset: int
    timestamp_ms: int
    key: str
    record: Record | None
    term: int | None
    void: bool
    reason: str = ""

    def values(self, whole: bool = False) -> dict[str, Any]:
        """All fields as builtins, the envelope's among them; arrays are their numbers of items, or
        `whole`.
        """
        found = {} if self.record is None else values_of(self.record, whole)
        envelope = {
            "partition": self.partition,
            "offset": self.offset,
            "key": self.key,
            "term": self.term,
            "void": self.void,
        }
        return envelope | found


@dataclass(slots=True)
class Log:
    """A topic of the log; `tell` is told what cannot be shown."""

    bus: Bus
    topic: str
    tell: Callable[[str], None]
    _fences: dict[int, Fence] = field(default_factory=dict[int, Fence])

    def between(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[Passing]:
        """Records of all partitions from `starts` to below `ends`, by time."""
        one_by_one = (self._partition(p, start, ends[p]) for p, start in starts.items())
        return heapq.merge(*one_by_one, key=lambda one: (one.timestamp_ms, one.partition))

    def follow(self, positions: Mapping[int, int], stop: threading.Event) -> Iterator[Passing]:
        """Records as they come, until `stop`."""
        at = dict(positions)
        while not stop.is_set():
            try:
                messages = self.bus.read(self.topic, at, wait_s=WAIT_S)
            except PositionLost:
                at = self._found_again(at)
                continue
            for message in sorted(messages, key=lambda m: m.timestamp_ms):
                yield self._judged(message)
            for message in messages:
                at[message.partition] = message.offset + 1

    def _partition(self, partition: int, start: int, end: int) -> Iterator[Passing]:
        at = start
        while at < end:
            try:
                messages = self.bus.read(self.topic, {partition: at})
            except PositionLost:
                at = self._found_again({partition: at})[partition]
                continue
            if not messages:
                return
            for message in messages:
                if message.offset < end:
                    yield self._judged(message)
            at = messages[-1].offset + 1

    def _found_again(self, at: Mapping[int, int]) -> dict[int, int]:
        """The first kept offsets, where these are below them."""
        begin = self.bus.begin(self.topic)
        for partition, offset in at.items():
            if offset < begin[partition]:
                self.tell(
                    f"{self.topic} {partition}: offsets {offset} to {begin[partition] - 1} are no "
                    "longer in the log; the archive may have them (rollstream query)"
                )
        return {partition: max(offset, begin[partition]) for partition, offset in at.items()}

    def _judged(self, message: Message) -> Passing:
        judged = None if message.value is None else self._judge(message.partition, message.value)
        envelope = judged.envelope if judged else None
        return Passing(
            message.partition,
            message.offset,
            message.timestamp_ms,
            message.key.decode(errors="replace"),
            judged.record if judged else None,
            envelope.term if envelope else None,
            judged.void if judged else False,
            judged.reason if judged else "tombstone",
        )

    def _judge(self, partition: int, value: bytes) -> Judgement:
        """Behind a hole the fence begins anew."""
        settings = self.bus.settings(self.topic)
        fenced, compacted = bool(settings.writer), settings.cleanup == "compact"
        fence = self._fences.get(partition, Fence())
        try:
            fence, judged = judge(
                value, fence, topic=self.topic, fenced=fenced, compacted=compacted
            )
        except SequenceGap as error:
            self.tell(f"{self.topic} {partition}: {error}")
            fence, judged = judge(
                value, Fence(), topic=self.topic, fenced=fenced, compacted=compacted
            )
        self._fences[partition] = fence
        return judged


def matching(passing: Iterator[Passing], conditions: Sequence[Condition]) -> Iterator[Passing]:
    """Those that meet all conditions."""
    if not conditions:
        return passing
    return (one for one in passing if meets(one, conditions, {}))


def meets(one: Passing, conditions: Sequence[Condition], more: Mapping[str, Any]) -> bool:
    """Whether it meets all of them; `more` is what the caller knows of it besides."""
    values = one.values() | asked_of(one.record, one.timestamp_ms) | dict(more)
    return all(condition.holds(values) for condition in conditions)


def in_json(topic: str, one: Passing) -> dict[str, Any]:
    """A record as a program reads it, arrays whole."""
    where = {"topic": topic, "timestamp_ms": one.timestamp_ms}
    why = {"reason": one.reason} if one.record is None else {}
    return plain(where | one.values(whole=True) | why)
