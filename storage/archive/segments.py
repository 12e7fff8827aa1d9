"""Reads archived rows. No offset disappears silently: one that cannot be read becomes part of a
`Hole`, unless compaction may have removed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.archive.log import ArchiveBus
from rollstream.storage.archive.reading import LISTINGS_MAX, ROWS_MAX
from rollstream.streams.bus import Message
from rollstream.streams.records import Fence, Opened, Position, Record
from rollstream.streams.topics import Topic
from rollstream.streams.values import Address

if TYPE_CHECKING:
    import pyarrow as pa

OFFSET_MAX = ROWS_MAX  # stands for the end of a partition whose end is unknown
NO_FENCE = Fence()  # stands for an unknown fence

HoleReason = Literal["truncated", "not archived", "lost", "damaged", "archived twice", "numbering"]


@dataclass(frozen=True, slots=True)
class Hole:
    """Reports that the offsets `[start, end)` of a partition cannot be read, with the reason:

    * truncated: the log was truncated there, and no archived file holds these offsets;
    * not archived: only the archive is read, and none of its files holds these offsets;
    * lost: the log, or one archived file, holds records before and after these offsets;
    * damaged: the archived file `key` should hold these offsets and cannot be read (`detail`).

    Two more reasons report an empty range:

    * archived twice: file `key` begins with offset `start`, which the file before it holds too;
      rows of both are returned once;
    * numbering: before `start`, sequence numbers of a single-holder role have a gap (invariant 7,
      `detail`).
    """

    topic: str
    partition: int
    start: int
    end: int
    reason: HoleReason
    fence: Fence = NO_FENCE
    """The fence (newest term and its next sequence number) at `end`; empty if unknown."""
    detail: str = ""
    key: str = ""

    def __str__(self) -> str:
        where = f"{self.topic}/{self.partition}"
        match self.reason:
            case "damaged" | "numbering":
                return f"{where}: {self.detail}"
            case "lost":
                return f"{where}: offsets {self.start} to {self.end - 1} are missing"
            case "archived twice":
                return f"{where}: offset {self.start} is archived twice ({self.key})"
            case _:
                return (
                    f"{where}: offsets {self.start} to {self.end - 1} are neither in the log nor "
                    "in the archive"
                )


MessageKind = Literal["records", "opened", "void", "misplaced", "unreadable", "tombstones"]


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """`record` is None, with a `reason`, if the message is not a record of the topic. `void`: the
    fence drops the record (invariant 7). `misplaced`: it is not in its group's partition, so
    trainer and dispatch skip it. `newer`: why only a newer release understands the message
    (invariant 14), else "".
    """

    topic: str
    address: Address
    timestamp_ms: int
    key: str
    record: Record | None
    term: int | None = None
    reason: str = ""
    void: bool = False
    misplaced: bool = False
    newer: str = ""

    @property
    def kind(self) -> MessageKind:
        if self.record is None:
            return "tombstones" if self.reason == "tombstone" else "unreadable"
        if self.void:
            return "void"
        if isinstance(self.record, Opened):
            return "opened"
        return "misplaced" if self.misplaced else "records"

    @property
    def time_s(self) -> float:
        return self.timestamp_ms / 1000


class ArchivedRows:
    """Rows at consecutive offsets from `first` on; `batch` has only the requested columns, `key` is
    their file's.
    """

    def __init__(self, topic: str, partition: int, batch: pa.RecordBatch, key: str) -> None:
        self.topic, self.partition, self.batch, self.key = topic, partition, batch, key
        self.first: int = batch.column("offset")[0].as_py()

    def __len__(self) -> int:
        return self.batch.num_rows

    @property
    def fence(self) -> Fence | None:
        """The fence after the newest row that counts; None if each row is void or has no
        envelope.
        """
        terms = self.batch.column("term").to_pylist()
        sequences = self.batch.column("sequence").to_pylist()
        voids = self.batch.column("void").to_pylist()
        for term, sequence, void in zip(terms[::-1], sequences[::-1], voids[::-1], strict=True):
            if term is not None and sequence is not None and not void:
                return Fence(term, sequence + 1)
        return None

    def records(self) -> Iterator[LogRecord]:
        """Yields the rows as records, built from the columns: the log's bytes are not restored."""
        from rollstream.storage.archive.tables import records_in

        names = ("key", "term", "void", "reason")
        keys, terms, voids, reasons = (self.batch.column(n).to_pylist() for n in names)
        stamps = self.batch.column("timestamp").cast("int64").to_pylist()
        for index, record in enumerate(records_in(self.batch)):
            yield LogRecord(
                self.topic,
                Address(self.partition, self.first + index),
                stamps[index],
                keys[index],
                record,
                terms[index],
                "" if record is not None else reasons[index] or "unknown schema",
                voids[index],
            )


Segment = list[Message] | ArchivedRows | Hole
"""One read: messages of the log (of several partitions, each in order), archived rows of one
partition, or a hole.
"""


@dataclass(slots=True)
class ArchivedPart:
    """The archived rows of one partition from `position` to `high`, exclusive, and the holes
    between. Iterating moves `position` behind each yielded value, so each row is yielded at most
    once, also if files are merged meanwhile. A damaged file raises `CorruptObject`; with
    `skip_damaged` its rows are a hole.
    """

    log: ArchiveBus
    topic: Topic
    partition: int
    position: Position
    high: Position
    columns: Sequence[str] | None
    skip_damaged: bool
    rows_max: int = field(default=OFFSET_MAX, init=False)

    def __iter__(self) -> Iterator[ArchivedRows | Hole]:
        failed_listings = 0
        while True:
            files = self.log.archived(self.topic.name, relist=failed_listings > 0).get(
                self.partition, []
            )
            before = self.position.offset
            try:
                yield from self._in_files(files)
            except ObjectMissing:  # merged into another file since the listing: list again
                failed_listings = 1 if self.position.offset > before else failed_listings + 1
                if failed_listings == LISTINGS_MAX:
                    raise
                continue
            break
        at, high = self.position, self.high
        if at.offset < high.offset < OFFSET_MAX:
            self.position = high
            if self.topic.cleanup != "compact":
                yield self._hole(at.offset, high.offset, self._absent, high.fence)
        elif at.offset == high.offset and at.fence == NO_FENCE:
            self.position = high

    def _in_files(self, files: Sequence[ArchiveFile]) -> Iterator[ArchivedRows | Hole]:
        below = [index for index, file in enumerate(files) if file.first <= self.position.offset]
        first = below[-1] if below else 0
        for index, file in enumerate(files[first:], first):
            at = self.position.offset
            if max(at, file.first) >= self.high.offset:
                return
            if index > first and file.first < at:
                yield self._hole(file.first, file.first, "archived twice", key=file.key)
            if file.first > at:
                self.position = Position(file.first)
                yield self._hole(at, file.first, self._absent)
            try:
                yield from self._rows(file)
            except CorruptObject as error:
                if not self.skip_damaged:
                    raise
                following = [f.first for f in files[index + 1 : index + 2]]
                yield self._damaged(file, following, str(error))

    def _rows(self, file: ArchiveFile) -> Iterator[ArchivedRows | Hole]:
        from rollstream.storage.archive.originals import batches_of

        assert self.log.store is not None
        for batch in batches_of(self.log.store, file, self.columns, rows_max=self.rows_max):
            offsets = batch.column("offset").to_numpy()
            low = int(offsets.searchsorted(self.position.offset))
            high = int(offsets.searchsorted(self.high.offset))
            gaps = (np.flatnonzero(np.diff(offsets[low:high]) != 1) + low + 1).tolist()
            for start, end in pairwise([low, *gaps, high]):
                if start == end:
                    continue
                rows = ArchivedRows(
                    file.topic, self.partition, batch.slice(start, end - start), file.key
                )
                at = self.position
                fence = (rows.fence if self.topic.writer else None) or at.fence
                self.position = Position(rows.first + len(rows), fence)
                if rows.first > at.offset:
                    yield self._hole(at.offset, rows.first, "lost")
                yield rows

    @property
    def _absent(self) -> HoleReason:
        return "truncated" if self.log.bus is not None else "not archived"

    def _damaged(self, file: ArchiveFile, following: list[int], detail: str) -> Hole:
        at = self.position.offset
        end = min([self.high.offset, *following])
        self.position = Position(max(at, end if end < OFFSET_MAX else at))
        return self._hole(at, self.position.offset, "damaged", detail=detail, key=file.key)

    def _hole(
        self, start: int, end: int, reason: HoleReason, fence: Fence = NO_FENCE, detail: str = "",
        key: str = "",
    ) -> Hole:  # fmt: skip
        return Hole(self.topic.name, self.partition, start, end, reason, fence, detail, key)
