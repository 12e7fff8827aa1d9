"""Writes the JSON headers of archived records column by column: the text that `streams/codec.py`
writes for each row's record, without creating the record.

Each field becomes one column of text, and the columns are joined at the end, so no Python runs per
row. The text need not be right for every value (JSON escapes other than of quotes, backslashes and
new lines are missing): the caller compares the record's bytes with their hash, and rows that fail
are restored record by record. A null is a row that this module cannot write.
"""
# pyarrow ships no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from functools import cache
from types import NoneType
from typing import Any, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import NODEFAULT, fields

from rollstream.storage.archive.rows import FLOAT_DEFAULTS, TOPIC_WRITERS
from rollstream.storage.archive.schema import ArchiveColumn, columns_of
from rollstream.streams.records import Record

Pieces = list[Any]
"""Columns of text and, between them, text that is the same in every row."""

_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"))
_FLOATS = (1e-3, 1e10)  # in this range Arrow formats a float as msgspec does


def headers(batch: pa.RecordBatch, topic: str, cls: type[Record], *, stated: bool) -> pa.Array:
    """The header of each row as binary; all rows are records of `cls`. `stated`: a float that
    equals its default is written nevertheless (`rows.with_default`).
    """
    present = set(batch.schema.names)
    pieces: Pieces = [f'{{"record":{{"schema":"{cls.schema()}"']
    for column in columns_of(cls):
        if column.name in present:
            pieces += _field(cls, column, batch.column(column.name), stated)
    pieces.append("}")
    if TOPIC_WRITERS[topic]:
        pieces += [f',"envelope":{{"role":"{TOPIC_WRITERS[topic]}","term":', *_of(batch.column("term"))]
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
