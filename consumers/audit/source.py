"""Reads all messages of a topic once, in the order of each partition: archived rows below the log's
first offset, then the log. Nothing is written.

A range that is neither archived nor in the log is returned as a `MissingRange`, with the fence
after it. An archived row is returned as the bytes that it had in the log, verified against the hash
stored beside it.

Archived trajectories are returned as columns of many rows. A fold checks all rows of a batch at
once and counts those that are plainly correct. It converts every other row to a record and applies
the same check as to the log, so each violation is decided and worded in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.audit.folds import AuditMessage, InvariantResult
from rollstream.errors import BusError, CorruptObject, PositionLost
from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.archive.reading import archived_files
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus, Message
from rollstream.streams.codec import decode
from rollstream.streams.records import GENERATED, Fence, Position, Trajectory
from rollstream.streams.topics import is_in_key_partition
from rollstream.streams.truncation import truncated_begin
from rollstream.streams.values import Address

if TYPE_CHECKING:
    import pyarrow as pa

    from rollstream.storage.archive.originals import OriginalBytes


Integers = NDArray[np.int64]


class RowFold(Protocol):
    """A fold that takes archived trajectories in batches."""

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """The next rows of a partition, in order; equivalent to `apply` of each of them."""
        ...


class TrajectoryRows:
    """Non-void `Trajectory` records of one partition, at consecutive offsets."""

    def __init__(self, batch: pa.RecordBatch, partition: int) -> None:
        self._batch, self.partition = batch, partition
        self.first: int = batch.column("offset")[0].as_py()
        self.names: list[str] = self.plain("trajectory")
        self.groups: list[int] = self.plain("group")
        self.hashes: list[str] = self.plain("hash")
        self.finishes: list[str] = self.plain("finish")

    def __len__(self) -> int:
        return self._batch.num_rows

    def plain(self, name: str) -> list[Any]:
        """A column's values."""
        return self._batch.column(name).to_numpy(zero_copy_only=False).tolist()

    def lengths(self, name: str) -> Integers:
        """Items in each row of a list column."""
        return np.diff(self._batch.column(name).offsets.to_numpy()).astype(np.int64)

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """The reward of each row, NaN if it has none."""
        return self._batch.column("reward").to_numpy(zero_copy_only=False)

    @cached_property
    def generated(self) -> Integers:
        """Number of generated tokens of each row, by their sources."""
        column = self._batch.column("sources")
        here, edges = column.values.to_numpy() == GENERATED, column.offsets.to_numpy().tolist()
        counts = map(np.count_nonzero, map(here.__getitem__, map(slice, edges[:-1], edges[1:])))  # pyright: ignore[reportUnknownArgumentType]
        return np.fromiter(counts, np.int64, len(edges) - 1)

    @cached_property
    def spans(self) -> SpanColumns:
        return SpanColumns(self._batch.column("spans"))

    def in_place(self, partitions: int) -> Iterator[TrajectoryRows]:
        """The rows that are in their group's partition, as consecutive pieces; all rows if
        `partitions` is 0.
        """
        if not partitions:
            yield self
            return
        here = {g: is_in_key_partition(g, self.partition, partitions) for g in set(self.groups)}
        if all(here.values()):
            yield self
            return
        placed = [here[group] for group in self.groups]
        edges = [0, *(np.flatnonzero(np.diff(placed)) + 1).tolist(), len(placed)]
        for start, end in pairwise(edges):
            if placed[start]:
                yield TrajectoryRows(self._batch.slice(start, end - start), self.partition)

    def seen(self, row: int) -> AuditMessage:
        """One row as a message."""
        from rollstream.storage.archive.originals import OriginalBytes

        (data,) = OriginalBytes("trajectories").values(self._batch.slice(row, 1))
        assert data is not None, "a tombstone among records"
        found, at = decode(data), Address(self.partition, self.first + row)
        return AuditMessage("trajectories", at, found.record, found.envelope, "", False, data)


def split_batch(
    batch: pa.RecordBatch, originals: OriginalBytes, partition: int, low: int, high: int | None
) -> Iterator[Message | TrajectoryRows]:
    """The rows from offset `low` on and below `high`, in order: trajectories whose bytes match
    their hashes as `TrajectoryRows`, all others as messages. Raises `CorruptObject` at a row that
    differs.
    """
    from rollstream.storage.archive.originals import messages_in

    offsets = batch.column("offset").to_numpy()
    wanted = np.flatnonzero((offsets >= low) & (offsets < (1 << 62 if high is None else high)))
    if not len(wanted):
        return
    batch = batch.take(wanted) if len(wanted) < batch.num_rows else batch
    offsets = offsets[wanted]
    plain = np.zeros(len(wanted), np.bool_)
    if originals.topic == "trajectories":
        voids = batch.column("void").to_numpy(zero_copy_only=False)
        plain = originals.proven(batch, Trajectory) & ~voids
    is_edge = (np.diff(plain) != 0) | (np.diff(offsets) != 1)
    edges = [0, *(np.flatnonzero(is_edge) + 1).tolist(), len(plain)]
    for start, end in pairwise(edges):
        piece = batch.slice(start, end - start)
        if plain[start]:
            yield TrajectoryRows(piece, partition)
        else:
            yield from messages_in(piece, originals, partition)


class SpanColumns:
    """All spans of some rows, concatenated; `row` is the index of the row of each span."""

    def __init__(self, column: pa.Array) -> None:
        spans, edges = column.flatten(), column.offsets.to_numpy()
        self.count: Integers = np.diff(edges).astype(np.int64)
        self.row: Integers = np.repeat(np.arange(len(column)), self.count)
        version = spans.field("version")
        self.start: Integers = spans.field("start").to_numpy()
        self.end: Integers = spans.field("end").to_numpy()
        self.number: Integers = version.field("number").to_numpy()
        self.term: Integers = version.field("term").to_numpy()

    def sums(self, values: Integers | NDArray[np.bool_]) -> Integers:
        """For each row the sum of a value per span."""
        return np.bincount(self.row, values, len(self.count)).astype(np.int64)


READ_RECORDS_MAX = 1024  # of one read
TRUNCATION_RETRIES_MAX = 100  # attempts on a topic that is truncated while it is read


@dataclass(frozen=True, slots=True)
class MissingRange:
    """Offsets `[start, end)` are missing; `fence` is the fence after them, empty if unknown."""

    partition: int
    start: int
    end: int
    fence: Fence


@dataclass(slots=True)
class AuditSource:
    """A run's log, its store, or both; `tally` is the result on the completeness of the data."""

    bus: Bus | None
    store: ObjectStore | None
    run: str
    tally: InvariantResult
    _ends: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    _at: dict[int, int] = field(default_factory=dict[int, int])
    is_archived: bool = False
    """Whether the message returned last is an archived row."""

    def fix_end(self, topic: str) -> None:
        """Ignore all records that are appended to this topic from now on; no effect for a topic
        that the log does not have.
        """
        if self.bus is None:
            return
        try:
            self.bus.settings(topic)
        except BusError as error:  # there is no error class for a missing topic
            if "has no topic" not in str(error):
                raise
            return
        self._ends[topic] = self.bus.end(topic)

    def has_log(self, topic: str) -> bool:
        return topic in self._ends

    def messages(self, topic: str) -> Iterator[Message | TrajectoryRows | MissingRange]:
        """The messages of the topic, with a `MissingRange` for each missing range; archived
        trajectories come as rows.
        """
        self._at = {}
        if topic not in self._ends:
            yield from self._archived(topic, None)
            return
        ends = self._ends[topic]
        self._at = dict.fromkeys(ends, 0)
        for _ in range(TRUNCATION_RETRIES_MAX):
            assert self.bus is not None
            begin = truncated_begin(self.bus, topic)
            yield from self._archived(topic, begin)
            yield from self._passed_over(begin, ends)
            try:
                yield from self._live(topic, ends)
            except PositionLost:  # truncated meanwhile: those records are archived, or missing
                continue
            return
        self.tally.add_unchecked(f"{topic} was truncated faster than it could be read")

    def _passed_over(
        self, begin: Mapping[int, Position], ends: Mapping[int, int]
    ) -> Iterator[MissingRange]:
        for partition, position in begin.items():
            start, end = self._at[partition], min(position.offset, ends[partition])
            if start < end:
                self._at[partition] = position.offset
                yield MissingRange(partition, start, end, position.fence)

    def _live(self, topic: str, ends: Mapping[int, int]) -> Iterator[Message]:
        assert self.bus is not None
        is_compacted = self.bus.settings(topic).cleanup == "compact"
        for partition, end in ends.items():
            while self._at[partition] < end:
                offset = self._at[partition]
                read = self.bus.read(topic, {partition: offset}, records_max=READ_RECORDS_MAX)
                wanted = [message for message in read if message.offset < end]
                if not wanted:
                    self._missing(topic, partition, offset, end, is_compacted)
                    break
                for message in wanted:
                    self._missing(
                        topic, partition, self._at[partition], message.offset, is_compacted
                    )
                    self._at[partition] = message.offset + 1
                    self.tally.counts["from the log"] += 1
                    self.is_archived = False
                    yield message

    def _missing(
        self, topic: str, partition: int, start: int, end: int, is_compacted: bool
    ) -> None:
        if start < end and not is_compacted:
            at = Address(partition, start)
            self.tally.add_violation(f"offsets {start} to {end - 1} are missing", topic, at)

    def _archived(
        self, topic: str, begin: Mapping[int, Position] | None
    ) -> Iterator[Message | TrajectoryRows | MissingRange]:
        """Archived rows from the present offset on, below the log's first offset (all of them
        without a log).
        """
        if self.store is None:
            return
        # By partition, the offset after the last row of its last file. In a second pass, after the
        # log was truncated meanwhile, files of the first pass are left out.
        reached: dict[int, int] = {}
        for file in archived_files(self.store, self.run, topic):
            at = self._at.setdefault(file.partition, 0)
            if file.first < reached.get(file.partition, 0):
                where = f"{topic}/{file.partition}"
                self.tally.add_violation(
                    f"{where}: offset {file.first} is archived twice", key=file.key
                )
            high = None if begin is None else begin[file.partition].offset
            if high is not None and (file.first >= high or at >= high):
                continue
            if file.first > at:
                yield MissingRange(file.partition, at, file.first, Fence())
                self._at[file.partition] = file.first
            yield from self._rows(topic, file, high)
            if file.first >= at:
                reached[file.partition] = self._at[file.partition]

    def _reach(self, topic: str, partition: int, piece: Message | TrajectoryRows) -> None:
        """Advance the offset over a row or rows. An archived file holds every offset from its first
        to its last.
        """
        is_one = isinstance(piece, Message)
        first, count = (piece.offset, 1) if is_one else (piece.first, len(piece))
        self._missing(topic, partition, self._at[partition], first, is_compacted=False)
        self._at[partition] = first + count
        self.tally.counts["from the archive"] += count

    def _rows(
        self, topic: str, file: ArchiveFile, high: int | None
    ) -> Iterator[Message | TrajectoryRows]:
        from rollstream.storage.archive.originals import (
            OriginalBytes,
            batches_of,
        )  # imports pyarrow

        assert self.store is not None
        partition, originals = file.partition, OriginalBytes(topic)
        try:
            for batch in batches_of(self.store, file):
                for piece in split_batch(batch, originals, partition, self._at[partition], high):
                    self._reach(topic, partition, piece)
                    self.is_archived = True
                    yield piece
        except CorruptObject as error:
            self.tally.add_violation(str(error), key=file.key)
