"""Restores the exact bytes that archived records had in the log, without decoding, and verifies
them by their hashes.
"""

from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from rollstream.errors import CorruptObject
from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.archive.reading import ROWS_MAX, batches_from, damaged_file
from rollstream.storage.archive.schema import (
    ENVELOPE_COLUMNS,
    ArchiveColumn,
    columns_of,
    topic_columns,
)
from rollstream.storage.archive.tables import originals_of
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Message
from rollstream.streams.codec import MAGIC
from rollstream.streams.records import SCHEMAS, Record

SLICE_BYTES = 2 << 20  # joined at a time, so that the second hash finds them in the CPU's cache
_PREFIX = np.dtype([("magic", "S4"), ("header", "<u4"), ("checksum", "<u8")])  # as in `codec.py`
_CHECKSUM = np.arange(8, 16)  # the bytes of the prefix that hold the checksum
_NOTHING = pa.scalar(b"", pa.large_binary())
_PADDING = pa.array([bytes(-size % 8) for size in range(8)], pa.large_binary())


class OriginalBytes:
    def __init__(self, topic: str) -> None:
        self.topic = topic

    def values(self, batch: pa.RecordBatch) -> Iterator[bytes | None]:
        """Yields exactly the bytes of each row, None for a tombstone. Raises `CorruptObject` at a
        row whose bytes do not match its hash, or `NewerRelease` if this release does not understand
        the one that archived it.
        """
        return map(_copied, self.views(batch))

    def views(self, batch: pa.RecordBatch) -> Iterator[memoryview | bytes | None]:
        """Yields the bytes as `values`, without a copy: a view keeps all rows in memory that were
        joined with its row, about `SLICE_BYTES`.
        """
        restored: list[memoryview | bytes | None] = [None] * batch.num_rows
        # Arrow joins `SLICE_BYTES` at a time; Python only computes two hashes per row: the record's
        # checksum, and the column `hash`, by which the ledger names the record.
        for cls, rows in _by_class(batch):
            for part, values, is_right in _restored(batch, rows, cls):
                if is_right.all() and len(rows) == batch.num_rows:
                    restored[part[0] : part[-1] + 1] = values
                    continue
                for row, value, right in zip(part.tolist(), values, is_right.tolist(), strict=True):
                    restored[row] = value if right else None
        # Rows whose hash does not match, or without `header` (those of release 0.1.0):
        # `originals_of` decides whether they are damaged.
        missing_rows = [row for row, value in enumerate(restored) if value is None]
        if not missing_rows:
            return iter(restored)
        others = originals_of(
            pa.Table.from_batches([batch.take(pa.array(missing_rows, pa.int64()))]), self.topic
        )
        return (next(others) if value is None else value for value in restored)

    def proven(self, batch: pa.RecordBatch, cls: type[Record]) -> NDArray[np.bool_]:
        """Returns True for each record of `cls` whose joined bytes match its hash. A row with False
        may be intact too: only `values` decides.
        """
        is_proven = np.zeros(batch.num_rows, np.bool_)
        for row_class, rows in _by_class(batch):
            if row_class is cls:
                for part, _, is_right in _restored(batch, rows, cls):
                    is_proven[part] = is_right
        return is_proven


def _by_class(batch: pa.RecordBatch) -> Iterator[tuple[type[Record], NDArray[np.int64]]]:
    if "header" not in batch.schema.names:
        return
    schemas, with_header = batch.column("schema"), pc.is_valid(batch.column("header"))
    for schema in pc.unique(schemas).to_pylist():
        if schema in SCHEMAS:
            rows = pc.and_(with_header, pc.fill_null(pc.equal(schemas, schema), False))
            yield SCHEMAS[schema], np.flatnonzero(rows.to_numpy(zero_copy_only=False))


def _restored(
    batch: pa.RecordBatch, rows: NDArray[np.int64], cls: type[Record]
) -> Iterator[tuple[NDArray[np.int64], list[memoryview], NDArray[np.bool_]]]:
    if not len(rows):
        return
    batch = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
    heads = batch.column("header").cast(pa.large_binary())
    parts: list[Any] = [_prefixes(pc.binary_length(heads)), heads]
    for column in columns_of(cls):
        if not column.is_array or column.name not in batch.schema.names:
            continue
        # An array that may be None, the last one of a record, has no bytes and no padding there.
        is_there = pc.is_valid(batch.column(column.name))
        if column.may_be_none and not pc.any(is_there).as_py():
            continue
        padding, data = _padding(pc.binary_length(parts[-1])), _bytes(batch, column)
        if column.may_be_none:
            padding = pc.if_else(is_there, padding, _NOTHING)
            data = pc.fill_null(data, _NOTHING)
        parts += [padding, data]
    hashes = batch.column("hash").to_numpy(zero_copy_only=False).tolist()
    total = sum(part.nbytes for part in parts)
    step = max(1, SLICE_BYTES * batch.num_rows // max(1, total))
    for first in range(0, batch.num_rows, step):
        cut = [part.slice(first, step) for part in parts]
        joined = pc.binary_join_element_wise(*cut, _NOTHING)
        yield rows[first : first + step], *_sealed(joined, hashes[first : first + step])


def _prefixes(lengths: pa.Array) -> pa.Array:
    prefixes = np.zeros(len(lengths), _PREFIX)
    prefixes["magic"], prefixes["header"] = MAGIC, lengths.to_numpy()
    offsets = np.arange(len(lengths) + 1) * _PREFIX.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(prefixes)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)


def _sealed(records: pa.Array, hashes: list[str]) -> tuple[list[memoryview], NDArray[np.bool_]]:
    """Write the checksum into each record; returns their bytes, and whether they match."""
    _, offsets, buffer = records.buffers()
    ends = np.frombuffer(offsets, np.int64, len(records) + 1)
    data, bounds = np.frombuffer(buffer, np.uint8), ends.tolist()
    views = list(map(data.data.__getitem__, map(slice, bounds[:-1], bounds[1:])))
    starts = (ends[:-1] + _PREFIX.itemsize).tolist()
    bodies = map(data.data.__getitem__, map(slice, starts, bounds[1:]))
    sums = np.fromiter(map(xxh3_64_intdigest, bodies), "<u8", len(views))
    # A row without one of its arrays has no bytes, and matches no hash.
    is_there = np.diff(ends) > 0
    data[ends[:-1][is_there, None] + _CHECKSUM] = sums[is_there, None].view(np.uint8)
    return views, np.array(list(map(eq, map(xxh3_64_hexdigest, views), hashes)), np.bool_)


def _bytes(batch: pa.RecordBatch, column: ArchiveColumn) -> pa.Array:
    lists, width = batch.column(column.name), column.items.bit_width // 8
    values = lists.values
    # The same memory, with offsets in bytes.
    offsets = (lists.offsets.to_numpy().astype(np.int64) + values.offset) * width
    valid = None
    if lists.null_count:
        valid = pa.array(pc.is_valid(lists).to_numpy(zero_copy_only=False)).buffers()[1]
    buffers = [valid, pa.py_buffer(offsets), values.buffers()[1]]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lists), buffers)


def _padding(sizes: pa.Array) -> pa.Array:
    return _PADDING.take(pc.bit_wise_and(sizes, 7))


class FileMessages:
    """One file's rows at consecutive offsets; the bytes of each match its hash. Raises
    `CorruptObject` if a row cannot be restored, or if the file is not an archive file.
    """

    def __init__(self, store: ObjectStore, topic: str, file: ArchiveFile) -> None:
        self._store, self._topic, self._file = store, topic, file
        arrays = [column.name for column in topic_columns(topic) if column.is_array]
        self._columns: list[str] | None = arrays
        self._parts: list[_FilePart] = []
        self._newest = _NO_PART
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._next = ROWS_MAX
        """The first offset that `_batches` has not returned."""

    def since(self, offset: int, count: int) -> list[Message]:
        messages: list[Message] = []
        while len(messages) < count:
            at = offset + len(messages)
            part = self._newest
            if not part.first <= at < part.end:
                matching = [other for other in self._parts if other.first <= at < other.end]
                if not matching and not self._read_to(at):
                    break
                part = self._newest = matching[0] if matching else self._parts[-1]
            messages += part.messages(self._topic, self._file.partition, at, count - len(messages))
            if not part.unread:
                # The next part reuses its memory: fresh memory costs more than all other work on a
                # record.
                self._parts.remove(part)
                self._newest = _NO_PART
        return messages

    def _read_to(self, offset: int) -> bool:
        try:
            return self._advance(offset)
        except CorruptObject:
            self._next = ROWS_MAX
            if self._columns is None:
                raise
        # Envelope columns (with `header`) and arrays do not restore this row: `originals_of` needs
        # all columns.
        self._columns = None
        return self._read_to(offset)

    def _advance(self, offset: int) -> bool:
        if offset < self._next:
            # An offset before `_next` begins a new pass over the file.
            row = offset - self._file.first
            self._batches = batches_of(self._store, self._file, self._columns, row)
        for batch in self._batches:
            offsets, stamps, keys = _places_in(batch)
            self._next = offsets[-1] + 1
            if self._next - offsets[0] != len(offsets):
                raise damaged_file(self._file, f"offsets from {offsets[0]} on are missing")
            if offsets[0] <= offset < self._next:
                values = list(OriginalBytes(self._topic).views(batch))
                self._parts.append(_FilePart(offsets, stamps, keys, values))
                return True
            if offset < self._next:  # between two rows of a damaged file
                break
        self._next = ROWS_MAX
        return False


# Messages at consecutive offsets; `unread` of them were not returned yet.
class _FilePart:
    def __init__(
        self,
        offsets: Sequence[int],
        stamps: Sequence[int],
        keys: Sequence[bytes],
        values: Sequence[memoryview | bytes | None],
    ) -> None:
        self._columns = offsets, stamps, keys, values
        self.first, self.end = (offsets[0], offsets[-1] + 1) if offsets else (0, 0)
        self.unread = len(offsets)

    def messages(self, topic: str, partition: int, offset: int, count: int) -> list[Message]:
        row = offset - self.first
        offsets, stamps, keys, values = self._columns
        messages = [
            # A copy keeps no other row in memory.
            Message(topic, partition, offsets[at], stamps[at], keys[at], _copied(values[at]))
            for at in range(row, min(row + count, len(offsets)))
        ]
        self.unread -= len(messages)
        return messages


_NO_PART = _FilePart((), (), (), ())


def _places_in(batch: pa.RecordBatch) -> tuple[list[int], list[int], list[bytes]]:
    return (
        batch.column("offset").to_numpy().tolist(),
        batch.column("timestamp").cast("int64").to_numpy().tolist(),
        batch.column("key").cast(pa.binary()).to_numpy(zero_copy_only=False).tolist(),
    )


def _copied(value: memoryview | bytes | None) -> bytes | None:
    return value.tobytes() if isinstance(value, memoryview) else value


def batches_of(
    store: ObjectStore,
    file: ArchiveFile,
    columns: Sequence[str] | None = None,
    row: int = 0,
    rows_max: int = ROWS_MAX,
) -> Iterator[pa.RecordBatch]:
    """Returns the rows in the order of offsets, with all columns, or with the envelope columns and
    `columns`; rows before index `row` may be left out. Raises `CorruptObject` if the file is not an
    archive file.
    """
    names = None if columns is None else [*ENVELOPE_COLUMNS.names, *columns]
    return batches_from(store, file, names, row, rows_max)


def messages_in(
    batch: pa.RecordBatch, originals: OriginalBytes, partition: int
) -> Iterator[Message]:
    """Yields the messages of these rows, in order. Raises as `OriginalBytes.values` does."""
    values = originals.values(batch)
    for offset, stamp, key, value in zip(*_places_in(batch), values, strict=True):
        yield Message(originals.topic, partition, offset, stamp, key, value)
