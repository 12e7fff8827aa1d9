"""Messages as Arrow tables, and back to records or to exactly their bytes."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, get_origin

import msgspec
import numpy as np
import pyarrow as pa

from rollstream.errors import CorruptObject, DecodeError, NewerRelease
from rollstream.storage.archive.rows import (
    ARCHIVED_CLASSES,
    ArchiveRow,
    as_original,
    bytes_of,
    classify_rows,
    with_default,
)
from rollstream.storage.archive.schema import (
    ENVELOPE_COLUMNS,
    SCALARS,
    ArchiveColumn,
    arrow_schema,
    columns_of,
    topic_columns,
)
from rollstream.streams.bus import Message
from rollstream.streams.codec import decode, record_hash
from rollstream.streams.records import SCHEMAS, Record
from rollstream.streams.release import upgrade_advice

__all__ = ["arrow_schema", "originals_of", "records_of", "table_of"]

# Raised by Arrow for a value that a column cannot hold.
_REFUSED = (OverflowError, pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError)


def table_of(
    topic: str,
    messages: Sequence[Message],
    rows: Sequence[ArchiveRow] | None = None,
    columns: Collection[str] | None = None,
) -> pa.Table:
    """Returns one row per message, in order. Without `rows`, the messages are classified as if the
    fence before them were unknown. `columns` are by default all.
    """
    topic_columns(topic)
    if rows is None:
        rows, _ = classify_rows(topic, messages)
    names = arrow_schema(topic).names if columns is None else columns
    try:
        return _table(topic, rows, names)
    # A record that the columns cannot hold (such as an integer beyond 64 bits) is stored as its
    # bytes, with the reason; `records_of` skips it.
    except _REFUSED:
        return _table(topic, [_representable(topic, row) for row in rows], names)


def records_of(table: pa.Table, *, with_void: bool = False) -> Iterator[Record]:
    for batch in table.to_batches():
        voids = batch.column("void").to_pylist()
        for void, record in zip(voids, records_in(batch), strict=True):
            if record is not None and (with_void or not void):
                yield record


def originals_of(table: pa.Table, topic: str) -> Iterator[bytes | None]:
    """Yields the bytes that each message had in the log; None for a tombstone. Raises
    `CorruptObject` if the bytes do not have the row's hash, `NewerRelease` if the table is of a
    newer release.
    """
    for batch in table.to_batches():
        originals, hashes = batch.column("original").to_pylist(), batch.column("hash").to_pylist()
        terms, sequences = (batch.column(name).to_pylist() for name in ("term", "sequence"))
        for index, record in enumerate(records_in(batch)):
            value = originals[index]
            if value is None and record is not None:
                envelope = terms[index], sequences[index]
                value = bytes_of(record, topic, *envelope)
                if record_hash(value) != hashes[index]:  # a default that is stated
                    value = bytes_of(with_default(record, stated=True), topic, *envelope)
            if hashes[index] != (None if value is None else record_hash(value)):
                at = f"{batch.column('partition')[index]}:{batch.column('offset')[index]}"
                _refuse_newer(batch, topic, at)
                raise CorruptObject(f"archive of {topic}: row {at} differs from its hash")
            yield value


def _refuse_newer(batch: pa.RecordBatch, topic: str, at: str) -> None:
    types = {field.name: field.type for field in arrow_schema(topic)}
    unknown = [field.name for field in batch.schema if types.get(field.name) != field.type]
    unknown += sorted(set(batch.column("schema").to_pylist()) - SCHEMAS.keys() - {None})
    if unknown:
        raise NewerRelease(
            f"archive of {topic}: row {at} has columns or schemas that this release does not "
            f"know ({', '.join(unknown)}); {upgrade_advice('')}"
        )


def _table(topic: str, rows: Sequence[ArchiveRow], names: Collection[str]) -> pa.Table:
    schema, messages = arrow_schema(topic), [row.message for row in rows]
    columns: list[pa.Array] = [
        pa.array([m.partition for m in messages], pa.int32()),
        pa.array([m.offset for m in messages], pa.int64()),
        pa.array([m.timestamp_ms for m in messages], pa.int64()).cast(schema.field(2).type),
        pa.array([m.key.decode(errors="replace") for m in messages], pa.string()),
    ]
    arrays = dict(zip(schema.names, columns, strict=False))
    for name in ENVELOPE_COLUMNS.names[4:]:
        if name in names:
            values = [getattr(row, name) for row in rows]
            arrays[name] = pa.array(values, ENVELOPE_COLUMNS.field(name).type)
    for column in topic_columns(topic):
        if column.name not in names:
            continue
        owners = {cls for cls in ARCHIVED_CLASSES[topic] if column.name in _names(cls)}
        values = [
            getattr(row.record, column.field) if type(row.record) in owners else None
            for row in rows
        ]
        is_array = column.is_array
        arrays[column.name] = _lists(column, values) if is_array else _array(column.arrow, values)
    fields = [field for field in schema if field.name in names]
    part = pa.schema(fields, schema.metadata)
    return pa.Table.from_arrays([arrays[field.name] for field in fields], schema=part)


@cache
def _names(cls: type[Record]) -> frozenset[str]:
    return frozenset(column.name for column in columns_of(cls))


def _lists(column: ArchiveColumn, values: Sequence[Any]) -> pa.Array:
    present = [value for value in values if value is not None]
    dtype = column.items.to_pandas_dtype()
    # Straight from the NumPy buffers, not row by row.
    items = np.concatenate(present) if present else np.empty(0, dtype)
    assert len(items) < 1 << 31, "a table of 2³¹ tokens or more; make smaller tables"
    return pa.ListArray.from_arrays(
        _offsets(values), pa.array(items), type=column.arrow, mask=_nulls(values)
    )


def _array(type_: pa.DataType, values: Sequence[Any]) -> pa.Array:
    if pa.types.is_struct(type_):
        children = [
            _array(field.type, [None if v is None else getattr(v, field.name) for v in values])
            for field in type_
        ]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=_nulls(values))
    if pa.types.is_list(type_):
        items = _array(type_.value_type, _flat(values))
        return pa.ListArray.from_arrays(_offsets(values), items, type=type_, mask=_nulls(values))
    if pa.types.is_map(type_):
        pairs = [None if value is None else list(value.items()) for value in values]
        return pa.array(pairs, type_)
    return pa.array(values, type_)


def _flat(values: Iterable[Any]) -> list[Any]:
    return [item for value in values if value is not None for item in value]


def _offsets(values: Sequence[Any]) -> pa.Array:
    lengths = (0 if value is None else len(value) for value in values)
    return pa.array(list(accumulate(lengths, initial=0)), pa.int32())


def _nulls(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


def _representable(topic: str, row: ArchiveRow) -> ArchiveRow:
    if row.record is None:
        return row
    try:
        _table(topic, [row], arrow_schema(topic).names)
    except _REFUSED as error:
        return as_original(row, f"{row.schema} does not fit the archive's columns: {error}")
    return row


def records_in(batch: pa.RecordBatch) -> Iterator[Record | None]:
    """Yields the record, also of a void row; None for one that is not a record."""
    schemas, originals = batch.column("schema").to_pylist(), batch.column("original").to_pylist()
    reasons = batch.column("reason").to_pylist()
    values: dict[type[Record], dict[ArchiveColumn, Sequence[Any]]] = {}
    for index, schema in enumerate(schemas):
        if schema is None and originals[index] is not None:
            # Bytes that the archiving release could not decode are tried again.
            yield _decode_again(originals[index])
        elif reasons[index] is not None or schema not in SCHEMAS:
            yield None
        elif originals[index] is not None:
            yield _kept_record(originals[index])
        else:
            cls = SCHEMAS[schema]
            if cls not in values:
                values[cls] = _fields_of(batch, cls)
            field_values = {
                column.field: column_values[index]
                for column, column_values in values[cls].items()
                if column.required or column_values[index] is not None
            }
            if any(field_values[field] is None for field in _never_none(cls)):
                raise CorruptObject(f"{schema}: row {index} lacks a value of the record")
            yield with_default(cls(**field_values), stated=False)


@cache
def _never_none(cls: type[Record]) -> tuple[str, ...]:
    columns = columns_of(cls)
    return tuple(c.field for c in columns if c.required and not c.may_be_none)


def _kept_record(data: bytes) -> Record:
    try:
        return decode(data).record
    except DecodeError as error:
        raise CorruptObject(f"a row holds damaged bytes: {error}") from error


def _decode_again(data: bytes) -> Record | None:
    try:
        return decode(data).record
    except DecodeError:
        return None


def _fields_of(batch: pa.RecordBatch, cls: type[Record]) -> dict[ArchiveColumn, Sequence[Any]]:
    # A field that an older file lacks is left out and so keeps its default.
    present = set(batch.schema.names)
    for column in columns_of(cls):
        if column.required and column.name not in present:
            raise CorruptObject(f"{cls.schema()}: the rows have no column {column.name}")
    return {
        column: _values(column, batch.column(column.name))
        for column in columns_of(cls)
        if column.name in present
    }


def _values(column: ArchiveColumn, array: pa.Array) -> Sequence[Any]:
    if not column.is_array:
        values = array.to_pylist(maps_as_pydicts="strict")
        if column.arrow in SCALARS.values() and get_origin(column.python) is not Literal:
            return values
        try:
            return msgspec.convert(values, list[column.python | None])  # pyright: ignore[reportInvalidTypeForm]
        except (msgspec.ValidationError, RecursionError) as error:
            raise CorruptObject(f"column {column.name} holds other values: {error}") from error
    items = array.values.to_numpy(zero_copy_only=True)
    starts = array.offsets.to_pylist()
    values = [items[start:end] for start, end in pairwise(starts)]
    if not column.may_be_none:
        return values
    return [v if is_there else None for v, is_there in zip(values, array.is_valid(), strict=True)]
