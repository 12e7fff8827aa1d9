"""Reads a topic for `tail`: messages in order of their times, validated and never changed.

It joins no consumer group and dead-letters nothing: undecodable bytes are shown as such, records
below the fence of invariant 7 as void. `archived_tail` reads the archive if no log is left.
"""

import heapq
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstream.analysis.fields import FieldCondition, derived_values, record_values
from rollstream.analysis.output import json_value
from rollstream.errors import PositionLost, SequenceGap
from rollstream.streams.bus import Bus, Message
from rollstream.streams.reader import ClassifiedMessage, classify_message
from rollstream.streams.records import Fence, Record

if TYPE_CHECKING:  # the log is read without duckdb and pyarrow
    import pyarrow as pa

    from rollstream.analysis.session import QuerySession

WAIT_S = 0.25  # longest delay of Ctrl-C


@dataclass(frozen=True, slots=True)
class TailRecord:
    """One message of a topic: its record, or the reason why it is not one."""

    partition: int
    offset: int
    timestamp_ms: int
    key: str
    record: Record | None
    term: int | None
    void: bool
    reason: str = ""

    def values(self, whole: bool = False) -> dict[str, Any]:
        """Returns the fields of envelope and record as builtins. Arrays are lists if `whole`, else
        their lengths.
        """
        found = {} if self.record is None else record_values(self.record, whole)
        envelope = {
            "partition": self.partition,
            "offset": self.offset,
            "key": self.key,
            "term": self.term,
            "void": self.void,
        }
        return envelope | found


@dataclass(slots=True)
class TopicTail:
    """A topic of the log; `warn` receives messages about records that cannot be shown."""

    bus: Bus
    topic: str
    warn: Callable[[str], None]
    _fences: dict[int, Fence] = field(default_factory=dict[int, Fence])

    def between(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[TailRecord]:
        """Yields the records of all partitions from `starts` to before `ends`, by time."""
        one_by_one = (self._partition(p, start, ends[p]) for p, start in starts.items())
        return heapq.merge(*one_by_one, key=lambda one: (one.timestamp_ms, one.partition))

    def follow(self, positions: Mapping[int, int], stop: threading.Event) -> Iterator[TailRecord]:
        """Yields new records until `stop` is set."""
        at = dict(positions)
        while not stop.is_set():
            try:
                messages = self.bus.read(self.topic, at, wait_s=WAIT_S)
            except PositionLost:
                at = self._found_again(at)
                continue
            for message in sorted(messages, key=lambda m: m.timestamp_ms):
                yield self._tail_record(message)
            for message in messages:
                at[message.partition] = message.offset + 1

    def _partition(self, partition: int, start: int, end: int) -> Iterator[TailRecord]:
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
                    yield self._tail_record(message)
            at = messages[-1].offset + 1

    def _found_again(self, at: Mapping[int, int]) -> dict[int, int]:
        """Returns the positions, raised to the first kept offsets; reports the truncated ones."""
        begin = self.bus.begin(self.topic)
        for partition, offset in at.items():
            if offset < begin[partition]:
                self.warn(
                    f"{self.topic} {partition}: offsets {offset} to {begin[partition] - 1} are no "
                    "longer in the log; the archive may have them (rollstream query)"
                )
        return {partition: max(offset, begin[partition]) for partition, offset in at.items()}

    def _tail_record(self, message: Message) -> TailRecord:
        classified = (
            None if message.value is None else self._classify(message.partition, message.value)
        )
        envelope = classified.envelope if classified else None
        return TailRecord(
            message.partition,
            message.offset,
            message.timestamp_ms,
            message.key.decode(errors="replace"),
            classified.record if classified else None,
            envelope.term if envelope else None,
            classified.void if classified else False,
            classified.reason if classified else "tombstone",
        )

    def _classify(self, partition: int, value: bytes) -> ClassifiedMessage:
        """Validates a message with its partition's fence; after a gap the fence starts again."""
        settings = self.bus.settings(self.topic)
        fenced, compacted = bool(settings.writer), settings.cleanup == "compact"
        fence = self._fences.get(partition, Fence())
        try:
            fence, classified = classify_message(
                value, fence, topic=self.topic, fenced=fenced, compacted=compacted
            )
        except SequenceGap as error:
            self.warn(f"{self.topic} {partition}: {error}")
            fence, classified = classify_message(
                value, Fence(), topic=self.topic, fenced=fenced, compacted=compacted
            )
        self._fences[partition] = fence
        return classified


def matching(
    records: Iterator[TailRecord], conditions: Sequence[FieldCondition]
) -> Iterator[TailRecord]:
    """Yields the records that meet all conditions."""
    if not conditions:
        return records
    return (one for one in records if meets(one, conditions, {}))


def meets(one: TailRecord, conditions: Sequence[FieldCondition], more: Mapping[str, Any]) -> bool:
    """True if the record meets all conditions; `more` holds further fields from the caller."""
    values = one.values() | derived_values(one.record, one.timestamp_ms) | dict(more)
    return all(condition.holds(values) for condition in conditions)


def tail_json(topic: str, one: TailRecord) -> dict[str, Any]:
    """Returns the record as a JSON object with complete arrays."""
    where = {"topic": topic, "timestamp_ms": one.timestamp_ms}
    why = {"reason": one.reason} if one.record is None else {}
    return json_value(where | one.values(whole=True) | why)


def archived_tail(session: "QuerySession", topic: str, where: str) -> Iterator[TailRecord]:
    """Yields the rows that meet an SQL condition, by time."""
    from rollstream.analysis.trajectory import archive_tables

    sql = f'SELECT * FROM {topic} WHERE {where} ORDER BY timestamp, partition, "offset"'
    for table in archive_tables(session, sql, topic):
        yield from _tail_records(table)


def _tail_records(table: "pa.Table") -> Iterator[TailRecord]:
    import pyarrow as pa

    from rollstream.storage.archive.tables import records_of

    envelope = table.select(
        ["partition", "offset", "timestamp", "key", "schema", "term", "void", "reason"]
    )
    records = records_of(table, with_void=True)
    stamps = table.column("timestamp").cast(pa.int64()).to_pylist()
    for row, stamp in zip(envelope.to_pylist(), stamps, strict=True):
        is_record = row["reason"] is None and row["schema"] is not None
        yield TailRecord(
            row["partition"],
            row["offset"],
            stamp,
            row["key"],
            next(records) if is_record else None,
            row["term"],
            row["void"],
            row["reason"] or "",
        )
