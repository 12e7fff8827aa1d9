"""Reads all messages of a topic once through a `LogView`, in the order of each partition.

An archived row is returned as the bytes that it had in the log, verified against the hash stored
beside it; archived trajectories are returned as columns of many rows (`TrajectoryRows`). A range
that is neither archived nor in the log is returned as a `Hole`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.audit.folds import AuditMessage, InvariantResult, LedgerIndex
from rollstream.errors import CorruptObject
from rollstream.storage.archive.segments import ArchivedRows, Hole
from rollstream.storage.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus, Message
from rollstream.streams.codec import decode
from rollstream.streams.records import GENERATED, Trajectory
from rollstream.streams.topics import is_in_key_partition
from rollstream.streams.values import Address, Span

if TYPE_CHECKING:
    import pyarrow as pa

    from rollstream.storage.archive.originals import OriginalBytes


Integers = NDArray[np.int64]


class RowFold(Protocol):
    """Takes archived trajectories in batches. A fold checks all rows of a batch at once and counts
    those that are plainly correct. It converts every other row to a record and applies the same
    check as to the log, so each violation is decided and worded in one place.
    """

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """Apply the next rows of a partition, in order, as `apply` would apply each of them."""
        ...


class TrajectoryRows:
    """Holds non-void `Trajectory` records of one partition, at consecutive offsets, as columns."""

    def __init__(self, batch: pa.RecordBatch, partition: int) -> None:
        self._batch, self.partition = batch, partition
        self.first: int = batch.column("offset")[0].as_py()
        self._plain: dict[str, list[Any]] = {}
        self._uses: RowUses | None = None

    def __len__(self) -> int:
        return self._batch.num_rows

    @property
    def names(self) -> list[str]:
        return self.plain("trajectory")

    @property
    def groups(self) -> list[int]:
        return self.plain("group")

    @property
    def hashes(self) -> list[str]:
        return self.plain("hash")

    def plain(self, name: str) -> list[Any]:
        """Returns a column's values, converted once."""
        if name not in self._plain:
            self._plain[name] = _values(self._batch.column(name))
        return self._plain[name]

    def lengths(self, name: str) -> Integers:
        """Returns the number of items in each row of a list column."""
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

    def span_values(self) -> list[list[dict[str, Any]]]:
        """Returns the spans of each row, in the form of a record's header."""
        return self._batch.column("spans").to_pylist()

    def uses(self, index: LedgerIndex) -> RowUses:
        """Returns the entries of the ledger's takes for these rows; looked up once for all
        folds.
        """
        if self._uses is None:
            self._uses = RowUses(self, index)
        return self._uses

    def in_place(self, partitions: int) -> Iterator[TrajectoryRows]:
        """Yields the rows that are in their group's partition, as consecutive pieces; all rows if
        `partitions` is 0.
        """
        if not partitions:
            yield self
            return
        here = {g: is_in_key_partition(g, self.partition, partitions) for g in set(self.groups)}
        if all(here.values()):
            yield self
            return
        yield from self.where([here[group] for group in self.groups])

    def where(self, wanted: Sequence[bool]) -> Iterator[TrajectoryRows]:
        """Yields the rows of which `wanted` is True, as consecutive pieces."""
        edges = [0, *(np.flatnonzero(np.diff(wanted)) + 1).tolist(), len(wanted)]
        for start, end in pairwise(edges):
            if wanted[start]:
                yield TrajectoryRows(self._batch.slice(start, end - start), self.partition)

    def since(self, row: int) -> TrajectoryRows:
        """Returns the rows from this one on."""
        return self if not row else TrajectoryRows(self._batch.slice(row), self.partition)

    def message(self, row: int) -> AuditMessage:
        """Returns one row as a message."""
        from rollstream.storage.archive.originals import OriginalBytes

        (data,) = OriginalBytes("trajectories").values(self._batch.slice(row, 1))
        assert data is not None, "a tombstone among records"
        found, at = decode(data), Address(self.partition, self.first + row)
        return AuditMessage("trajectories", at, found.record, found.envelope, "", False, data)


class RowUses:
    """Holds the entries of the ledger's takes for some rows. `found` has the entry of each row or
    None; in the arrays `step` is 0 and `is_named` False for a row without one. `is_here` is True
    where the take names this very completion, `is_same` where its group and hash are the row's too.
    """

    def __init__(self, rows: TrajectoryRows, index: LedgerIndex) -> None:
        self.found = list(map(index.uses.get, rows.names))
        found = self.found
        self.is_named = np.array([use is not None for use in found], np.bool_)
        self.step: Integers = np.array([0 if u is None else u.step for u in found], np.int64)
        here = [
            u is not None and u.at.offset == at and u.at.partition == rows.partition
            for at, u in enumerate(found, rows.first)
        ]
        self.is_here = np.array(here, np.bool_)
        same = [
            u is not None and u.hash == hash_ and u.group == group
            for u, hash_, group in zip(found, rows.hashes, rows.groups, strict=True)
        ]
        self.is_same = self.is_here & np.array(same, np.bool_)


class CheckedHeader(msgspec.Struct, gc=False):
    """Holds the fields of a trajectory's header that folds read as columns."""

    trajectory: str
    group: int
    index: int
    rollout: str
    rollout_term: int
    spans: tuple[Span, ...]
    finish: str
    reward: float | None = None
    wave: int = 0


class _HeaderText(msgspec.Struct, gc=False):
    record: CheckedHeader


_HEADERS = msgspec.json.Decoder(list[_HeaderText])
_COLUMNS = tuple(name for name in CheckedHeader.__struct_fields__ if name != "spans")
_record = attrgetter("record")
_fields = attrgetter(*_COLUMNS)
_spans = attrgetter("spans")
_span_fields = attrgetter("start", "end", "version.number", "version.term")


def _values(column: pa.Array) -> list[Any]:
    """Returns a column's values. NumPy converts columns without nulls, ten times as fast."""
    return (
        column.to_pylist() if column.null_count else column.to_numpy(zero_copy_only=False).tolist()
    )


def _agree(rows: TrajectoryRows, headers: pa.Array) -> NDArray[np.bool_]:
    """Returns True for each row whose columns equal its header, which the hash covers. A row with
    False is restored from its columns, and then its hash decides.
    """
    try:
        texts = b"[%b]" % b",".join(_values(headers))
        found = list(map(_record, _HEADERS.decode(texts)))
    except msgspec.DecodeError:
        return np.zeros(len(rows), np.bool_)
    agree = np.ones(len(rows), np.bool_)
    for name, stated in zip(_COLUMNS, zip(*map(_fields, found), strict=True), strict=True):
        held = rows.plain(name)
        if list(stated) != held:
            agree &= np.array([a == b for a, b in zip(stated, held, strict=True)], np.bool_)
    spans, given = rows.spans, list(map(_spans, found))
    numbers = np.stack([spans.start, spans.end, spans.number, spans.term], axis=1)
    flat = chain.from_iterable(map(_span_fields, chain.from_iterable(given)))
    if spans.count.tolist() != list(map(len, given)) or numbers.ravel().tolist() != list(flat):
        stated = [msgspec.to_builtins(one.spans) for one in found]
        pairs = zip(stated, rows.span_values(), strict=True)
        agree &= np.array([list(one) == other for one, other in pairs], np.bool_)
    return agree


class SpanColumns:
    """Holds all spans of some rows as concatenated columns; `row` is the index of the row of each
    span.
    """

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
        """Returns for each row the sum of a value per span."""
        return np.bincount(self.row, values, len(self.count)).astype(np.int64)


def _pieces(rows: ArchivedRows, originals: OriginalBytes) -> Iterator[Message | TrajectoryRows]:
    """Yields the rows in order: trajectories whose bytes match their hashes as `TrajectoryRows`,
    all others as messages. Raises `CorruptObject` at a row that differs.
    """
    import pyarrow as pa

    from rollstream.storage.archive.originals import messages_in

    batch = rows.batch
    is_whole = is_plain = np.zeros(len(rows), np.bool_)
    if rows.topic == "trajectories":
        voids = batch.column("void").to_numpy(zero_copy_only=False)
        is_whole = originals.proven(batch, Trajectory) & ~voids
        is_plain = is_whole.copy()
        if is_whole.any():  # never in files of 0.1.0, which have no headers
            checked = batch if is_whole.all() else batch.filter(pa.array(is_whole))
            found = TrajectoryRows(checked, rows.partition)
            is_plain[is_whole] = _agree(found, checked.column("header"))
            if is_plain.all():
                yield found
                return
    columns = [name for name in batch.schema.names if name != "header"]
    kinds = is_whole.astype(np.int8) + is_plain
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(rows)]
    for start, end in pairwise(edges):
        piece = batch.slice(start, end - start)
        if is_plain[start]:
            yield TrajectoryRows(piece, rows.partition)
        elif is_whole[start]:
            yield from messages_in(piece.select(columns), originals, rows.partition)
        else:
            yield from messages_in(piece, originals, rows.partition)


@dataclass(slots=True)
class AuditSource:
    """Reads a run's log, the archive in its store, or both; `result` is the result on the
    completeness of the data.
    """

    bus: Bus | None
    store: ObjectStore | None
    run: str
    result: InvariantResult
    is_archived: bool = False
    """Whether the message returned last is an archived row."""
    view: LogView = field(init=False)
    _ends: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])

    def __post_init__(self) -> None:
        self.view = LogView(self.bus, self.store, self.run)

    def fix_end(self, topic: str) -> None:
        """Ignore all records that are appended to this topic from now on; no effect for a topic
        that the log does not have.
        """
        if self.bus is not None and self.view.has(topic):
            self._ends[topic] = self.view.end(topic)

    def has_log(self, topic: str) -> bool:
        return topic in self._ends

    def messages(
        self, topic: str, start: Callable[[int], int] = lambda partition: 0
    ) -> Iterator[Message | TrajectoryRows | Hole]:
        """Yields the messages of the topic from `start` of each partition up to its fixed end, with
        a `Hole` for each range that is neither archived nor in the log; archived trajectories come
        as rows.
        """
        view = self.view if topic in self._ends else LogView(None, self.store, self.run)
        starts = {partition: start(partition) for partition in range(view.partitions(topic))}
        reader = view.topic(topic, starts, on_hole=self._judge, skip_damaged=True)
        for segment in reader.segments(self._ends.get(topic)):
            self.is_archived = isinstance(segment, ArchivedRows)
            if isinstance(segment, ArchivedRows):
                yield from self._rows(segment)
            elif isinstance(segment, list):
                yield from segment
            elif segment.reason != "lost":
                yield segment

    def _originals(self, topic: str) -> OriginalBytes:
        from rollstream.storage.archive.originals import OriginalBytes  # imports pyarrow

        return OriginalBytes(topic)

    def _rows(self, rows: ArchivedRows) -> Iterator[Message | TrajectoryRows | Hole]:
        at = rows.first
        try:
            for piece in _pieces(rows, self._originals(rows.topic)):
                first, count = (
                    (piece.offset, 1) if isinstance(piece, Message) else (piece.first, len(piece))
                )
                at = first + count
                yield piece
        except CorruptObject as error:
            end = rows.first + len(rows)
            hole = Hole(
                rows.topic, rows.partition, at, end, "damaged", detail=str(error), key=rows.key
            )
            self._judge(hole)
            yield hole

    def _judge(self, hole: Hole) -> None:
        """Record a violation for records that should be there; truncated ranges are only
        counted.
        """
        if hole.reason == "lost":
            at = Address(hole.partition, hole.start)
            what = f"offsets {hole.start} to {hole.end - 1} are missing"
            self.result.add_violation(what, hole.topic, at)
        elif hole.key:
            self.result.add_violation(str(hole), key=hole.key)
