"""Archived trajectories as columns of many rows whose bytes match their hashes.

A fold checks all rows of a batch at once and counts those that are plainly correct. It converts
every other row to a record (`seen`) and applies the same check as to the log, so each violation is
decided and worded in one place.
"""
# pyarrow ships no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.audit.seen import AuditMessage
from rollstream.streams.bus import Message
from rollstream.streams.codec import decode
from rollstream.streams.records import GENERATED, Trajectory
from rollstream.streams.values import Address
from rollstream.streams.topics import is_in_key_partition

if TYPE_CHECKING:  # pyarrow is imported only with an archive
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
        counts = map(np.count_nonzero, map(here.__getitem__, map(slice, edges[:-1], edges[1:])))
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
    their hashes as `TrajectoryRows`, all others as messages. Raises `CorruptObject` at a row that differs.
    """
    from rollstream.storage.archive.messages import messages_in

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
