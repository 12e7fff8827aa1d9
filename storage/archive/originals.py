"""Restores the bytes of archived rows column by column and verifies them against their hashes.

1. Headers: each field becomes one column of JSON text, equal to the text that `streams/codec.py`
   writes for each row's record, and the columns are joined, so no Python runs per row and no record
   is created. The text may be wrong for some values, because only quotes, backslashes and new lines
   are escaped; step 3 finds such rows. A null marks a row that cannot be written this way.

2. Arrays of tokens are used as they are in the file. Arrow joins both, a few hundred rows at a
   time.

3. Every row is hashed twice: for the checksum inside its bytes and for its hash in the ledger. A
   row that is not restored exactly is left to `originals_of` in `tables.py`, which restores it
   record by record and decides whether it is damaged.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Any, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import NODEFAULT, fields
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from rollstream.storage.archive.rows import FLOAT_DEFAULTS, TOPIC_WRITERS
from rollstream.storage.archive.schema import ArchiveColumn, columns_of
from rollstream.storage.archive.tables import originals_of
from rollstream.streams.codec import MAGIC
from rollstream.streams.records import SCHEMAS, Record

Pieces = list[Any]
"""Columns of text and, between them, text that is the same in every row."""

_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"))
_FLOATS = (1e-3, 1e10)  # in this range Arrow formats a float as msgspec does


def headers(batch: pa.RecordBatch, topic: str, cls: type[Record], *, stated: bool) -> pa.Array:
    """The header of each row as binary; all rows are records of `cls`. `stated`: a float that
    equals its default is written nevertheless (`with_default` in `rows.py`).
    """
    present = set(batch.schema.names)
    pieces: Pieces = [f'{{"record":{{"schema":"{cls.schema()}"']
    for column in columns_of(cls):
        if column.name in present:
            pieces += _field(cls, column, batch.column(column.name), stated)
    pieces.append("}")
    if TOPIC_WRITERS[topic]:
        pieces += [
            f',"envelope":{{"role":"{TOPIC_WRITERS[topic]}","term":',
            *_of(batch.column("term")),
        ]
        pieces += [',"sequence":', *_of(batch.column("sequence")), "}"]
    return _joined([*pieces, "}"], batch.num_rows).cast(pa.binary())


def _field(cls: type[Record], column: ArchiveColumn, array: pa.Array, stated: bool) -> Pieces:
    """A comma, the key and the value; nothing if the value is the default."""
    key, default = _names(cls)[column.field]
    label = f',"{key}":'
    if column.is_array:
        return [label, *_of(pc.list_value_length(array))]
    if default is NODEFAULT:
        if array.null_count and NoneType in get_args(column.python):
            return [label, pc.fill_null(_joined(_of(array), len(array)), "null")]
        return [label, *_of(array)]
    if array.null_count == len(array):
        return []
    left_out = _is_default(array, default)
    if stated and FLOAT_DEFAULTS[cls] == (column.field, default):
        left_out = pc.is_null(array)
    count = pc.sum(left_out).as_py()
    if count in (0, len(array)):
        return [] if count else [label, *_of(array)]
    return [pc.if_else(left_out, "", _joined([label, *_of(array)], len(array)))]


@cache
def _names(cls: type[Record]) -> dict[str, tuple[str, Any]]:
    """Each field's key in the header, and its default."""
    return {field.name: (field.encode_name, field.default) for field in fields(cls)}


def _is_default(array: pa.Array, default: Any) -> pa.Array:
    """Whether each value is its default or missing."""
    if default is None:
        return pc.is_null(array)
    if default == ():
        return pc.equal(pc.fill_null(pc.list_value_length(array), 0), 0)
    return pc.fill_null(pc.equal(array, pa.scalar(default, array.type)), True)


def _of(array: pa.Array) -> Pieces:
    """The JSON of each value; a null value makes the row null."""
    type_ = array.type
    if pa.types.is_struct(type_):
        pieces: Pieces = []
        for index, field in enumerate(type_):
            pieces += [f',"{field.name}":' if index else f'{{"{field.name}":']
            pieces += _of(pc.struct_field(array, index))
        return [*pieces, "}"]
    if pa.types.is_map(type_):
        return _map(array)
    if pa.types.is_list(type_):
        items = array.flatten()
        return _bracketed(array, _joined(_of(items), len(items)), "[", "]")
    if len(array) and not array.null_count and pc.all(pc.equal(array, array[0])).as_py():
        return [_joined(_plain(array[:1]), 1)[0].as_py()]
    return _plain(array)


def _plain(array: pa.Array) -> Pieces:
    """The JSON of numbers, truth values and strings."""
    if pa.types.is_string(array.type):
        return ['"', _escaped(array), '"']
    return [_floats(array) if pa.types.is_floating(array.type) else pc.cast(array, pa.string())]


def _escaped(array: pa.Array) -> pa.Array:
    edges = memoryview(array.buffers()[1]).cast("i")[array.offset : array.offset + len(array) + 1]
    data = bytes(memoryview(array.buffers()[2] or b"")[edges[0] : edges[-1]])
    for plain, escaped in _ESCAPES:
        if plain.encode() in data:
            array = pc.replace_substring(array, plain, escaped)
    return array


def _floats(array: pa.Array) -> pa.Array:
    if not array.null_count:
        sizes = np.abs(array.to_numpy())
        if ((sizes == 0) | ((sizes >= _FLOATS[0]) & (sizes < _FLOATS[1]))).all():
            texts = pc.cast(array, pa.string())
            is_whole = pc.equal(pc.floor(array), array)
            return pc.if_else(is_whole, pc.binary_join_element_wise(texts, ".0", ""), texts)
    written = msgspec.json.encode(pc.fill_null(array, 0.0).to_numpy().tolist())
    texts = pa.array(written[1:-1].split(b",")[: len(array)], pa.string())
    return pc.if_else(pc.is_valid(array), texts, None) if array.null_count else texts


def _map(array: pa.Array) -> Pieces:
    lists = array.cast(pa.list_(pa.struct([("key", pa.string()), ("value", array.type.item_type)])))
    pairs = lists.flatten()
    keys, values = (_of(pc.struct_field(pairs, index)) for index in (0, 1))
    return _bracketed(lists, _joined([*keys, ":", *values], len(pairs)), "{", "}")


def _bracketed(lists: pa.Array, items: pa.Array, first: str, last: str) -> Pieces:
    """The items of each list between brackets; `items` are those of all lists, end to end."""
    ends = pc.cumulative_sum(_lengths(lists))
    offsets = pa.concat_arrays([pa.array([0], ends.type), ends]).cast(pa.int32())
    mask = pc.is_null(lists) if lists.null_count else None
    regrouped = pa.ListArray.from_arrays(offsets, items, mask=mask)
    return [first, pc.binary_join(regrouped, ","), last]


def _lengths(lists: pa.Array) -> pa.Array:
    return pc.fill_null(pc.list_value_length(lists), 0)


def _joined(pieces: Pieces, rows: int) -> pa.Array:
    """The pieces joined, null in rows where any piece is null."""
    merged: Pieces = []
    for piece in pieces:
        if merged and isinstance(piece, str) and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    if len(merged) == 1 and isinstance(merged[0], str):
        return pa.array([merged[0]], pa.string()).take(pa.array(np.zeros(rows, np.int32)))
    return pc.binary_join_element_wise(*merged, "") if len(merged) > 1 else merged[0]


SLICE_BYTES = 1 << 20  # joined at a time, so that the second hash finds the bytes in cache
_PREFIX = struct.Struct("<4sIQ")  # magic, length of the header, checksum of what follows
_NOTHING = pa.scalar(b"", pa.large_binary())
_PADDING = pa.array([bytes(-size % 8) for size in range(8)], pa.large_binary())

Slice = Sequence[tuple[int, memoryview, str]]
"""Of each row: length of its header, all its bytes after the prefix, its hash."""


class OriginalBytes:
    """Restores the bytes that rows of one topic had in the log. An instance remembers per record
    class whether a run's bytes state floats that equal their default, so use one for all rows of a
    run.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._stated: dict[type[Record], bool] = {}

    def values(self, batch: pa.RecordBatch) -> Iterator[bytes | None]:
        """Exactly the bytes of each row, None for a tombstone, as `originals_of` does.

        Raises `CorruptObject` at a row that no longer gives the bytes of its hash.
        """
        found: list[bytes | None] = [None] * batch.num_rows
        for cls, rows in _by_class(batch):
            made = self._either_way(batch, rows, cls, _checked_bytes)
            for row, value in zip(rows.tolist(), made, strict=True):
                found[row] = value
        for row, value in enumerate(found):
            if value is None:
                yield from originals_of(pa.Table.from_batches([batch.slice(row, 1)]), self.topic)
            else:
                yield value

    def proven(self, batch: pa.RecordBatch, cls: type[Record]) -> NDArray[np.bool_]:
        """Which rows are surely records of `cls` whose columns give the bytes of their hashes. A
        row with False may be intact too: only `values` decides.
        """
        found = np.zeros(batch.num_rows, np.bool_)
        for of, rows in _by_class(batch):
            if of is cls:
                found[rows] = self._either_way(batch, rows, cls, _checked_hashes)
        return found

    def _either_way(
        self,
        batch: pa.RecordBatch,
        rows: NDArray[np.int64],
        cls: type[Record],
        make: Callable[[Slice], list[Any]],
    ) -> list[Any]:
        """The result of `make` for each row, in whichever of the two ways its bytes state a float
        that equals its default (`with_default` in `rows.py`).
        """
        if not len(rows):
            return []
        chosen = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
        if FLOAT_DEFAULTS[cls] is None:
            return _build(chosen, self.topic, cls, False, make)
        if cls not in self._stated:
            self._stated[cls] = not _build(
                chosen.slice(0, 1), self.topic, cls, False, _checked_hashes
            )[0]
        stated = self._stated[cls]
        found = _build(chosen, self.topic, cls, stated, make)
        left = [index for index, one in enumerate(found) if not one]
        if left:
            again = _build(chosen.take(pa.array(left)), self.topic, cls, not stated, make)
            for index, one in zip(left, again, strict=True):
                found[index] = one
        return found


def _by_class(batch: pa.RecordBatch) -> Iterator[tuple[type[Record], NDArray[np.int64]]]:
    """The rows of each class whose columns hold the complete record."""
    whole = pc.and_(pc.is_null(batch.column("reason")), pc.is_null(batch.column("original")))
    schemas = batch.column("schema")
    for schema in pc.unique(schemas).to_pylist():
        if schema in SCHEMAS:
            rows = pc.and_(whole, pc.fill_null(pc.equal(schemas, schema), False))
            yield SCHEMAS[schema], np.flatnonzero(rows.to_numpy(zero_copy_only=False))


def _build(
    batch: pa.RecordBatch,
    topic: str,
    cls: type[Record],
    stated: bool,
    make: Callable[[Slice], list[Any]],
) -> list[Any]:
    heads = headers(batch, topic, cls, stated=stated).cast(pa.large_binary())
    names = set(batch.schema.names)
    present = [c for c in columns_of(cls) if c.is_array and c.name in names]
    arrays = [_bytes(batch.column(column.name), column) for column in present]
    sizes = pc.binary_length(heads)
    parts: list[Any] = [heads]
    if arrays:
        parts.append(_padding(sizes))
    for index, array in enumerate(arrays):
        parts += [_padding(pc.binary_length(arrays[index - 1]))] if index else []
        parts.append(array)
    hashes = batch.column("hash")
    found: list[Any] = []
    total = sum(part.nbytes for part in parts)
    step = max(1, SLICE_BYTES * batch.num_rows // max(1, total))
    for first in range(0, batch.num_rows, step):
        cut = [part.slice(first, step) for part in parts]
        bodies = pc.binary_join_element_wise(*cut, _NOTHING) if len(cut) > 1 else cut[0]
        found += make(_rows(sizes.slice(first, step), bodies, hashes.slice(first, step)))
    return found


def _bytes(lists: pa.Array, column: ArchiveColumn) -> pa.Array:
    """A list column as binary: the same memory, with offsets in bytes."""
    width = column.items.bit_width // 8
    offsets = lists.offsets.to_numpy().astype(np.int64) * width
    valid = None
    if lists.null_count:
        valid = pa.array(pc.is_valid(lists).to_numpy(zero_copy_only=False)).buffers()[1]
    values = lists.values
    data = values.buffers()[1]
    offsets += values.offset * width
    buffers = [valid, pa.py_buffer(offsets), data]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lists), buffers)


def _padding(sizes: pa.Array) -> pa.Array:
    """Zero bytes up to a multiple of 8."""
    return _PADDING.take(pc.bit_wise_and(sizes, 7))


def _rows(sizes: pa.Array, bodies: pa.Array, hashes: pa.Array) -> Slice:
    """The slice's rows; a row that could not be written has no bytes, which match no hash."""
    ends = np.frombuffer(bodies.buffers()[1], np.int64, len(bodies) + 1, bodies.offset * 8).tolist()
    data = memoryview(bodies.buffers()[2])
    lengths = pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False).tolist()
    named = hashes.to_numpy(zero_copy_only=False).tolist()
    return [
        (length, data[start:end], hash_)
        for length, start, end, hash_ in zip(lengths, ends[:-1], ends[1:], named, strict=True)
    ]


def _checked_bytes(rows: Slice) -> list[bytes | None]:
    """The bytes of rows that match their hash, None for others."""
    found: list[bytes | None] = []
    for length, body, hash_ in rows:
        value = b"".join((_PREFIX.pack(MAGIC, length, xxh3_64_intdigest(body)), body))
        found.append(value if xxh3_64_hexdigest(value) == hash_ else None)
    return found


def _checked_hashes(rows: Slice) -> list[bool]:
    """Whether each row matches its hash, without a copy of its bytes."""
    found: list[bool] = []
    for length, body, hash_ in rows:
        hasher = xxh3_64(_PREFIX.pack(MAGIC, length, xxh3_64_intdigest(body)))
        hasher.update(body)
        found.append(hasher.hexdigest() == hash_)
    return found
