"""Reads a run's records for the audit, once and in the order of each partition, from log and
archive.

Most archived trajectories come as columns of many rows (`TrajectoryRows`), which folds check
faster; all other records as messages. Archived rows are verified by their hashes. A range that
cannot be read is returned as a `Hole`, recorded as a violation, or both.
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
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.segments import ArchivedRows, Hole
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


# Why a second form beside records: of an archive of 200,704 trajectories of 128 tokens the audit
# takes 6.2 s of processor time by columns and 21 s by records, which decode each trajectory.
class RowFold(Protocol):
    """A fold that takes archived trajectories in batches: it counts the rows that are certainly
    correct, and applies every other row as a record, so each violation is decided in one place.
    """

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """Apply the next rows of a partition."""
        ...


class TrajectoryRows:
    """`Trajectory` records of one partition, at consecutive offsets from `first` on and none of
    them void, as columns.
    """

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
        if name not in self._plain:
            self._plain[name] = _values(self._batch.column(name))
        return self._plain[name]

    def lengths(self, name: str) -> Integers:
        return np.diff(self._batch.column(name).offsets.to_numpy()).astype(np.int64)

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """The reward of each row, NaN if it has none."""
        return self._batch.column("reward").to_numpy(zero_copy_only=False)

    @cached_property
    def generated(self) -> Integers:
        """The number of generated tokens of each row, counted in its `sources`."""
        column = self._batch.column("sources")
        generated, edges = column.values.to_numpy() == GENERATED, column.offsets.to_numpy().tolist()
        rows = map(generated.__getitem__, map(slice, edges[:-1], edges[1:]))
        counts = map(np.count_nonzero, rows)  # pyright: ignore[reportUnknownArgumentType]
        return np.fromiter(counts, np.int64, len(edges) - 1)

    @cached_property
    def has_arrays(self) -> NDArray[np.bool_]:
        """Whether each row has named arrays, or needs a feature; False in files without these."""
        has_any = np.zeros(len(self), np.bool_)
        for name in {"arrays", "array_bytes", "needs"} & set(self._batch.schema.names):
            has_any |= self.lengths(name) > 0
        return has_any

    @cached_property
    def spans(self) -> SpanColumns:
        return SpanColumns(self._batch.column("spans"))

    def span_values(self) -> list[list[dict[str, Any]]]:
        """Returns the spans of each row as a record's JSON header has them."""
        return self._batch.column("spans").to_pylist()

    def uses(self, index: LedgerIndex) -> RowUses:
        """Returns the ledger's statements about these rows, looked up once for all folds."""
        if self._uses is None:
            self._uses = RowUses(self, index)
        return self._uses

    def in_place(self, partitions: int) -> Iterator[TrajectoryRows]:
        """Yields the rows in the partition of their group, as pieces of consecutive rows; all rows
        if the number of `partitions` is unknown (0).
        """
        if not partitions:
            yield self
            return
        placed = {g: is_in_key_partition(g, self.partition, partitions) for g in set(self.groups)}
        if all(placed.values()):
            yield self
            return
        yield from self.where([placed[group] for group in self.groups])

    def where(self, mask: Sequence[bool]) -> Iterator[TrajectoryRows]:
        """Yields the rows for which `mask` is True, as pieces of consecutive rows."""
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        for start, end in pairwise(edges):
            if mask[start]:
                yield TrajectoryRows(self._batch.slice(start, end - start), self.partition)

    def since(self, row: int) -> TrajectoryRows:
        return self if not row else TrajectoryRows(self._batch.slice(row), self.partition)

    def message(self, row: int) -> AuditMessage:
        from rollstream.storage.archive.originals import OriginalBytes

        (data,) = OriginalBytes("trajectories").values(self._batch.slice(row, 1))
        assert data is not None, "a tombstone among records"
        decoded, at = decode(data), Address(self.partition, self.first + row)
        return AuditMessage("trajectories", at, decoded.record, decoded.envelope, "", False, data)


class RowUses:
    """The ledger's statements about the trajectory of each row: `found` is its entry in the index,
    None if no take names it; `step` the step that trained it, or 0. `is_here`: the take names this
    very record; `is_same`: also with this group and hash.
    """

    def __init__(self, rows: TrajectoryRows, index: LedgerIndex) -> None:
        self.found = list(map(index.uses.get, rows.names))
        uses = self.found
        self.is_named = np.array([use is not None for use in uses], np.bool_)
        self.step: Integers = np.array([0 if u is None else u.step for u in uses], np.int64)
        is_here = [
            u is not None and u.at.offset == at and u.at.partition == rows.partition
            for at, u in enumerate(uses, rows.first)
        ]
        self.is_here = np.array(is_here, np.bool_)
        same = [
            u is not None and u.hash == hash_ and u.group == group
            for u, hash_, group in zip(uses, rows.hashes, rows.groups, strict=True)
        ]
        self.is_same = self.is_here & np.array(same, np.bool_)


class CheckedHeader(msgspec.Struct, gc=False):
    """The fields of a trajectory's header that folds read as columns."""

    trajectory: str
    group: int
    index: int
    rollout: str
    rollout_term: int
    spans: tuple[Span, ...]
    finish: str
    reward: float | None = None
    wave: int = 0
    # Not a column: it decides which tokens are trained, so `_agree` refuses rows that have any.
    abandoned: tuple[int, ...] = ()


class _HeaderText(msgspec.Struct, gc=False):
    record: CheckedHeader


_HEADERS = msgspec.json.Decoder(list[_HeaderText])
_COLUMNS = tuple(
    name for name in CheckedHeader.__struct_fields__ if name not in ("spans", "abandoned")
)
_record = attrgetter("record")
_fields = attrgetter(*_COLUMNS)
_spans = attrgetter("spans")
_span_fields = attrgetter("start", "end", "version.number", "version.term")


def _values(column: pa.Array) -> list[Any]:
    # A column without nulls is converted through NumPy, ten times as fast.
    return (
        column.to_pylist() if column.null_count else column.to_numpy(zero_copy_only=False).tolist()
    )


def _agree(rows: TrajectoryRows, headers: pa.Array) -> NDArray[np.bool_]:
    """Returns True for each row whose columns equal its JSON header and which has no abandoned
    turns.
    """
    try:
        # The hash of a row covers the header and not the columns, so only equal columns may be
        # trusted. Other rows are restored as messages, and there their hash decides.
        texts = b"[%b]" % b",".join(_values(headers))
        parsed = list(map(_record, _HEADERS.decode(texts)))
    except (ValueError, RecursionError):
        return np.zeros(len(rows), np.bool_)
    agree = np.array([not header.abandoned for header in parsed], np.bool_)
    for name, stated in zip(_COLUMNS, zip(*map(_fields, parsed), strict=True), strict=True):
        column = rows.plain(name)
        if list(stated) != column:
            agree &= np.array([a == b for a, b in zip(stated, column, strict=True)], np.bool_)
    spans, row_spans = rows.spans, list(map(_spans, parsed))
    numbers = np.stack([spans.start, spans.end, spans.number, spans.term], axis=1)
    flat = chain.from_iterable(map(_span_fields, chain.from_iterable(row_spans)))
    if spans.count.tolist() != list(map(len, row_spans)) or numbers.ravel().tolist() != list(flat):
        stated = [msgspec.to_builtins(checked.spans) for checked in parsed]
        pairs = zip(stated, rows.span_values(), strict=True)
        agree &= np.array([list(first) == second for first, second in pairs], np.bool_)
    return agree


class SpanColumns:
    """All spans of some rows as columns: `row` is the index of a span's row, `start` and `end` its
    token range, `number` and `term` its version; `count` is the number of spans per row.
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
        """Returns the sum of `values` (one per span) over the spans of each row."""
        return np.bincount(self.row, values, len(self.count)).astype(np.int64)


def _pieces(rows: ArchivedRows, originals: OriginalBytes) -> Iterator[Message | TrajectoryRows]:
    """Yields the rows in order. Raises `CorruptObject` at a row that does not match its hash."""
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
            proven_rows = TrajectoryRows(checked, rows.partition)
            is_plain[is_whole] = _agree(proven_rows, checked.column("header"))
            if is_plain.all():
                yield proven_rows
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
    """Reads a run's log, the archive in its store, or both. Call `fix_end` for each topic of the
    log first. Missing and damaged data are recorded in `result`.
    """

    bus: Bus | None
    store: ObjectStore | None
    run: str
    result: InvariantResult
    is_archived: bool = False
    """Whether the piece that `messages` yielded last is archived."""
    view: LogView = field(init=False)
    _ends: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    _named: set[str] = field(default_factory=set[str])
    """Reported damage: a part may be met below the log's begin, and again beside it."""

    def __post_init__(self) -> None:
        self.view = LogView(self.bus, self.store, self.run)

    def fix_end(self, topic: str) -> None:
        """Fix the topic's present end: later records are not read."""
        if self.bus is not None and self.view.has(topic):
            self._ends[topic] = self.view.end(topic)

    def has_log(self, topic: str) -> bool:
        """Whether the topic is read from the log, and not from the archive alone."""
        return topic in self._ends

    def messages(
        self, topic: str, start: Callable[[int], int] = lambda partition: 0
    ) -> Iterator[Message | TrajectoryRows | Hole]:
        """Yields the topic's messages from `start` of each partition up to the fixed end, archived
        trajectories as rows. A range that cannot be read is yielded as a `Hole`; lost records are
        only recorded as a violation.
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

    def check_archived(self, topic: str) -> int:
        """Verify the topic's archived rows that the log has too; returns their number."""
        assert self.bus is not None
        archive, rows = LogView(None, self.store, self.run), 0
        for segment in archive.topic(topic, self.bus.begin(topic), skip_damaged=True).segments():
            if isinstance(segment, ArchivedRows):
                pieces = [piece for piece in self._rows(segment) if not isinstance(piece, Hole)]
                rows += sum(1 if isinstance(piece, Message) else len(piece) for piece in pieces)
            elif isinstance(segment, Hole) and segment.reason == "damaged":
                self._judge(segment)
        return rows

    def _rows(self, rows: ArchivedRows) -> Iterator[Message | TrajectoryRows | Hole]:
        from rollstream.storage.archive.originals import OriginalBytes  # imports pyarrow

        at = rows.first
        try:
            for piece in _pieces(rows, OriginalBytes(rows.topic)):
                first, count = (
                    (piece.offset, 1) if isinstance(piece, Message) else (piece.first, len(piece))
                )
                at = first + count
                yield piece
        except CorruptObject as error:
            # The rows from the first damaged one on.
            end = rows.first + len(rows)
            hole = Hole(
                rows.topic, rows.partition, at, end, "damaged", detail=str(error), key=rows.key
            )
            self._judge(hole)
            yield hole

    def _judge(self, hole: Hole) -> None:
        if hole.reason == "lost":
            at = Address(hole.partition, hole.start)
            what = f"offsets {hole.start} to {hole.end - 1} are missing"
            self.result.add_violation(what, hole.topic, at)
        # A file that is damaged or archived twice. Other holes, such as a truncated log, are no
        # violation.
        elif hole.key and str(hole) not in self._named:
            self._named.add(str(hole))
            self.result.add_violation(str(hole), key=hole.key)
