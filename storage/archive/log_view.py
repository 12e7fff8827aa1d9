"""Reads log and archive as one. A truncated record comes from the archive, at the same offset and
byte for byte; an offset that neither has is a `Hole`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from rollstream.errors import BusError, NewerRelease, PositionLost, SequenceGap, TopicMissing
from rollstream.storage.archive import segments
from rollstream.storage.archive.log import ArchiveBus
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus, Message
from rollstream.streams.classified import ClassifiedMessage, classify_message
from rollstream.streams.reader import from_begin
from rollstream.streams.records import Annotation, Fence, Position, Take, Trajectory
from rollstream.streams.topics import Topic, is_in_key_partition
from rollstream.streams.values import Address

if TYPE_CHECKING:
    import pyarrow as pa

READ_RECORDS = 8192  # most records of one read; a bus returns at most 16 MiB
POLLED_ROWS = 1024  # most rows of one poll, so that a merged file of months needs little memory


class LogView(ArchiveBus):
    """`bus` is None where only the archive exists, `store` where only the log does. The methods of
    `Bus` raise `PositionLost` where a `TopicView` (`topic`) reports a hole.
    """

    def __init__(self, bus: Bus | None, store: ObjectStore | None, run: str) -> None:
        super().__init__(bus, store, run)
        self._recorded: dict[str, int] | None = None

    def topic(
        self,
        topic: str,
        start: Mapping[int, int | Position] | None = None,
        *,
        columns: Sequence[str] | None = None,
        on_hole: Callable[[segments.Hole], None] | None = None,
        skip_damaged: bool = False,
    ) -> TopicView:
        """Returns a reader of the topic, by default from the first record ever, so truncated and
        not archived records are a hole. Raises `TopicMissing`.
        """
        settings = self.settings(topic)
        start = dict.fromkeys(range(settings.partitions), 0) if start is None else start
        begin: Mapping[int, Position] = {}
        if self.bus is not None and settings.writer and any(start.values()):
            begin = from_begin(self.bus, topic)
        view = TopicView(
            self, settings, {p: _position(at, begin.get(p)) for p, at in start.items()}
        )
        view.columns, view.skip_damaged = columns, skip_damaged
        view.on_hole = on_hole
        return view

    def has(self, topic: str) -> bool:
        """Returns whether the log has the topic; without a log, whether the archive has a file of
        it.
        """
        if self.bus is None:
            return bool(self.archived(topic))
        try:
            return bool(self.bus.settings(topic))
        except TopicMissing:
            return False

    def key_partitions(self, topic: str) -> int:
        """Returns the partitions over which the run spreads the topic's keys; 0 if unknown. Without
        a log, the first take in the archived ledger states it.
        """
        if self.bus is not None:
            return self.bus.partitions(topic)
        if self._recorded is None:
            self._recorded = {}
            for message in self.topic("ledger", skip_damaged=True).records():
                if isinstance(message.record, Take) and message.record.read:
                    self._recorded = {r.topic: len(r.offsets) for r in message.record.read}
                    break
        return self._recorded.get(topic, 0)


class TopicView:
    """Reads one topic, from one thread: `poll` follows it, the other readers end. Even while
    records are archived and truncated, each offset is returned at most once, in the order of its
    partition, or reported as a `Hole`, unless compaction may have removed it.

    `positions` are the next offsets, each with the fence before it: another view may continue
    there. A damaged archived file raises `CorruptObject`; with `skip_damaged` its rows are a hole.
    """

    def __init__(self, view: LogView, topic: Topic, start: Mapping[int, Position]) -> None:
        self.positions = dict(start)
        self.holes: list[segments.Hole] = []
        self.counts: Counter[str] = Counter()
        self.columns: Sequence[str] | None = None
        self.skip_damaged = False
        self.on_hole: Callable[[segments.Hole], None] | None = None
        self._view, self._topic = view, topic
        self._parts: dict[int, segments.ArchivedPart] = {}
        self._rows: dict[int, Iterator[segments.ArchivedRows | segments.Hole]] = {}
        self._ended: set[int] = set()  # without a log: partitions whose archive was opened
        self._first = 0  # the partition read first rotates, so that a full one starves no other
        self._rows_max = segments.OFFSET_MAX  # most rows of one segment of the next archived part

    def poll(self, records_max: int = 512, *, wait_s: float = 0.0) -> list[segments.LogRecord]:
        """Returns at most `records_max`, or `POLLED_ROWS` from an archived file; [] if none came
        within `wait_s`.
        """
        self._rows_max = POLLED_ROWS
        while True:
            segment = self._next(self._offsets(), {}, records_max, wait_s)
            if not isinstance(segment, segments.Hole):
                return [] if segment is None else list(self._classified(segment))

    def records(self, ends: Mapping[int, int] | None = None) -> Iterator[segments.LogRecord]:
        """Yields all that count up to `ends` (default: the present end), partition by partition.
        Raises `NewerRelease` at a record of a newer release.
        """
        for segment in self.segments(ends):
            if isinstance(segment, segments.Hole):
                continue
            for message in self._classified(segment):
                if message.newer:
                    topic, at = self._topic.name, message.address
                    raise NewerRelease(
                        f"{topic}/{at.partition} offset {at.offset}: {message.newer}"
                    )
                if message.kind == "records":
                    yield message

    def messages(self, ends: Mapping[int, int] | None = None) -> Iterator[segments.LogRecord]:
        """Yields all messages in the same order, those that do not count included."""
        for segment in self.segments(ends):
            if not isinstance(segment, segments.Hole):
                yield from self._classified(segment)

    def segments(self, ends: Mapping[int, int] | None = None) -> Iterator[segments.Segment]:
        """Yields everything up to `ends` (default: the present end), as it is read, without
        classification.
        """
        if ends is None:
            ends = {} if self._view.bus is None else self._view.end(self._topic.name)
        self._rows_max = segments.OFFSET_MAX
        for partition in list(self.positions):
            end = ends.get(partition, segments.OFFSET_MAX if self._view.bus is None else 0)
            while (at := self.positions[partition]).offset < end:
                segment = self._next({partition: at.offset}, ends, READ_RECORDS, 0.0)
                if segment is None:
                    break
                yield segment
            at = self.positions[partition]
            if self._view.bus is not None and at.offset < end:  # compacted, or lost by the log
                self.positions[partition] = Position(end, at.fence)
                if self._topic.cleanup != "compact":
                    yield self._state(self._hole(partition, at.offset, end))

    def tables(self, ends: Mapping[int, int] | None = None) -> Iterator[pa.Table]:
        """Yields rows in the archive's columns, or in those of `columns`; only for archived
        topics.
        """
        import pyarrow as pa

        from rollstream.storage.archive.rows import classify_rows
        from rollstream.storage.archive.tables import table_of

        for segment in self.segments(ends):
            if isinstance(segment, segments.ArchivedRows):
                yield pa.Table.from_batches([segment.batch])
            elif isinstance(segment, list):
                fences = {p: at.fence for p, at in self.positions.items()}
                columns = self.columns
                is_exact = columns is None or not {"original", "header"}.isdisjoint(columns)
                rows, after = classify_rows(self._topic.name, segment, fences, is_exact)
                for partition, fence in after.items():
                    self.positions[partition] = Position(self.positions[partition].offset, fence)
                yield table_of(self._topic.name, segment, rows, self.columns)

    def is_behind(self, ends: Mapping[int, int]) -> bool:
        return any(at.offset < ends.get(p, 0) for p, at in self.positions.items())

    def _offsets(self) -> dict[int, int]:
        partitions = list(self.positions)
        self._first = (self._first + 1) % max(1, len(partitions))
        rotated = partitions[self._first :] + partitions[: self._first]
        return {partition: self.positions[partition].offset for partition in rotated}

    def _next(
        self,
        offsets: Mapping[int, int],
        ends: Mapping[int, int],
        records_max: int,
        wait_s: float,
    ) -> segments.Segment | None:
        """Returns the next segment, and moves positions behind it; fences of a segment of the log
        only `_classified` moves.
        """
        bus = self._view.bus
        while True:
            for partition in offsets.keys() & self._parts.keys():
                segment = self._of_archive(partition)
                if segment is not None:
                    return segment
            at = {p: self.positions[p].offset for p in offsets}
            offsets = {
                p: offset for p, offset in at.items() if offset < ends.get(p, segments.OFFSET_MAX)
            }
            if not offsets:
                return None
            if bus is None:
                begin = {
                    p: Position(ends.get(p, segments.OFFSET_MAX))
                    for p in offsets.keys() - self._ended
                }
                self._ended |= begin.keys()
            else:
                try:
                    messages = bus.read(
                        self._topic.name, offsets, records_max=records_max, wait_s=wait_s
                    )
                    return self._of_log(messages, ends)
                except PositionLost:
                    begin = from_begin(bus, self._topic.name)
            if not self._open_parts(offsets, begin, ends):
                if bus is None:
                    return None
                raise BusError(f"{self._topic.name}: {offsets} are lost, yet not below {begin}")

    def _of_log(self, messages: list[Message], ends: Mapping[int, int]) -> list[Message] | None:
        messages_below = [
            m for m in messages if m.offset < ends.get(m.partition, segments.OFFSET_MAX)
        ]
        for message in messages_below:
            at = self.positions[message.partition]
            self.positions[message.partition] = Position(message.offset + 1, at.fence)
            if message.offset > at.offset and self._topic.cleanup != "compact":
                self._state(self._hole(message.partition, at.offset, message.offset))
        return messages_below or None

    def _open_parts(
        self, offsets: Mapping[int, int], begin: Mapping[int, Position], ends: Mapping[int, int]
    ) -> bool:
        """Start to read the archive where positions are below `begin`; returns False if none is."""
        if self._view.bus is not None:
            # `begin` was read before, so the listing has each record below it. An older listing may
            # end at 4 while records 5 to 9 are archived and truncated, and they would seem lost.
            self._view.archived(self._topic.name, relist=True)
        for partition, at in offsets.items():
            high, end = begin.get(partition, Position()), ends.get(partition, segments.OFFSET_MAX)
            # Only the position decides: if the log is truncated to 6 after records 4 and 5 were
            # read from it, rows 6 to 9 of the file 4–9 are returned.
            if at < min(high.offset, end):
                self._parts[partition] = part = segments.ArchivedPart(
                    self._view, self._topic, partition, self.positions[partition],
                    high if high.offset <= end else Position(end), self.columns, self.skip_damaged,
                )  # fmt: skip
                part.rows_max = self._rows_max
                self._rows[partition] = iter(part)
        return bool(offsets.keys() & self._parts.keys())

    def _of_archive(self, partition: int) -> segments.ArchivedRows | segments.Hole | None:
        segment = next(self._rows[partition], None)
        self.positions[partition] = self._parts[partition].position
        if segment is None:
            del self._parts[partition], self._rows[partition]
        elif isinstance(segment, segments.Hole):
            self._state(segment)
        return segment

    # ---- classification --------------------------------------------------------------------------

    def _classified(
        self, segment: list[Message] | segments.ArchivedRows
    ) -> Iterator[segments.LogRecord]:
        records = (
            segment.records()
            if isinstance(segment, segments.ArchivedRows)
            else (self._of_message(message) for message in segment)
        )
        for record in records:
            placed = self._placed(record)
            self.counts[placed.kind] += 1
            yield placed

    def _of_message(self, message: Message) -> segments.LogRecord:
        at, value = Address(message.partition, message.offset), message.value
        where = (self._topic.name, at, message.timestamp_ms, message.key.decode(errors="replace"))
        if value is None:
            return segments.LogRecord(*where, None, reason="tombstone")
        classified = self._classify(at, value)
        envelope = classified.envelope
        return segments.LogRecord(
            *where,
            classified.record,
            None if envelope is None else envelope.term,
            classified.reason,
            classified.void,
            newer=classified.newer,
        )

    def _classify(self, at: Address, value: bytes) -> ClassifiedMessage:
        position = self.positions[at.partition]
        name, fenced = self._topic.name, bool(self._topic.writer)
        compacted = self._topic.cleanup == "compact"
        try:
            fence, classified = classify_message(
                value, position.fence, topic=name, fenced=fenced, compacted=compacted
            )
        except SequenceGap as gap:
            # After a gap in the numbering the fence starts again.
            where = (self._topic.name, at.partition, at.offset, at.offset)
            self._state(segments.Hole(*where, "numbering", detail=str(gap)))
            fence, classified = classify_message(
                value, Fence(), topic=name, fenced=fenced, compacted=compacted
            )
        self.positions[at.partition] = Position(position.offset, fence)
        return classified

    def _placed(self, message: segments.LogRecord) -> segments.LogRecord:
        record = message.record
        if not isinstance(record, Trajectory | Annotation):
            return message
        partitions = self._view.key_partitions(self._topic.name)
        if not partitions or is_in_key_partition(
            record.group, message.address.partition, partitions
        ):
            return message
        return msgspec.structs.replace(message, misplaced=True)

    def _hole(self, partition: int, start: int, end: int) -> segments.Hole:
        return segments.Hole(self._topic.name, partition, start, end, "lost")

    def _state(self, hole: segments.Hole) -> segments.Hole:
        self.holes.append(hole)
        if self.on_hole is not None:
            self.on_hole(hole)
        return hole


def _position(at: int | Position, begin: Position | None) -> Position:
    if isinstance(at, Position):
        return at
    return begin if begin is not None and begin.offset == at else Position(at)
