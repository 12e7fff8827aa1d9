"""The columns of a topic's archive files: the envelope's, then each field of its record classes,
null in rows without it.
"""

from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import msgspec
import pyarrow as pa
from msgspec.structs import fields

from rollstream.errors import ConfigurationError
from rollstream.storage.archive.rows import ARCHIVED_CLASSES
from rollstream.streams.records import Record

SCHEMA_NUMBER = 1
"""The columns' format, stored in each file; new record fields do not change it."""

ENVELOPE_COLUMNS = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("schema", pa.string()),
        pa.field("hash", pa.string()),
        pa.field("term", pa.int64()),
        pa.field("sequence", pa.int64()),
        pa.field("void", pa.bool_(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("original", pa.binary()),
        pa.field("header", pa.binary()),
    ]
)
"""`schema` is the record's tag, `hash` that of the message's bytes; `term` and `sequence` are those
of a single-holder role, else null; `void`: the record does not count (invariant 7). `rows.py`
explains `reason`, `original` and `header`.
"""

TEXT = pa.string()
NOT_NULL = frozenset(field.name for field in ENVELOPE_COLUMNS if not field.nullable)

# The item types of record arrays, by the suffix of their encoded names (`logprobs:f4`).
_ARRAYS = {"u4": pa.uint32(), "u1": pa.uint8(), "f4": pa.float32()}
SCALARS = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


class ArchiveColumn(msgspec.Struct, frozen=True, eq=False):
    """`name` and `arrow` are the column's name and type, `field` and `python` those of the record's
    field.
    """

    name: str
    field: str
    arrow: pa.DataType
    python: Any
    is_array: bool
    required: bool

    @property
    def may_be_none(self) -> bool:
        return NoneType in get_args(self.python)

    @property
    def items(self) -> pa.DataType:
        return self.arrow.value_type


@cache
def arrow_schema(topic: str) -> pa.Schema:
    """Raises `ConfigurationError` for a topic that is not archived."""
    return pa.schema(
        [*ENVELOPE_COLUMNS, *(pa.field(c.name, c.arrow) for c in topic_columns(topic))]
    )


def misfit(topic: str, schema: pa.Schema) -> str:
    """Returns "" for a file with the envelope columns, in which each column of the archive occurs
    at most once and has the archive's type.
    """
    names, types = schema.names, schema.types
    if schema.equals(arrow_schema(topic)):
        return ""
    lacking = [name for name in ENVELOPE_COLUMNS.names if name not in names]
    # `header` came after release 0.1.0. Other lacking columns came after the file's release;
    # columns and nested fields of other names are a newer release's.
    if set(lacking) - {"header"}:
        return f"it lacks {', '.join(lacking)}"
    for field in arrow_schema(topic):
        if names.count(field.name) > 1:
            return f"it has the column {field.name} twice"
        stored = types[names.index(field.name)] if field.name in names else field.type
        if not _holds(field.type, stored):
            return f"its column {field.name} has the type {stored}"
    return ""


def _holds(expected: pa.DataType, stored: pa.DataType) -> bool:
    if pa.types.is_struct(expected) and pa.types.is_struct(stored):
        fields_by_name = {field.name: field.type for field in stored}
        both = [field for field in expected if field.name in fields_by_name]
        return len(fields_by_name) == stored.num_fields and all(
            _holds(field.type, fields_by_name[field.name]) for field in both
        )
    if pa.types.is_list(expected) and pa.types.is_list(stored):
        nulls = stored.value_field.nullable and not expected.value_field.nullable
        return not nulls and _holds(expected.value_type, stored.value_type)
    if pa.types.is_map(expected) and pa.types.is_map(stored):
        key, item = stored.key_type, stored.item_type
        return _holds(expected.key_type, key) and _holds(expected.item_type, item)
    return expected == stored


@cache
def topic_columns(topic: str) -> tuple[ArchiveColumn, ...]:
    """Returns the columns in the order of the topic's record classes and their fields, after the
    envelope columns. Classes with a field of the same name share its column.
    """
    if topic not in ARCHIVED_CLASSES:
        archived_topics = ", ".join(ARCHIVED_CLASSES)
        raise ConfigurationError(f"topic {topic!r} is not archived; archived are {archived_topics}")
    columns: dict[str, ArchiveColumn] = {}
    for cls in ARCHIVED_CLASSES[topic]:
        for column in columns_of(cls):
            same = columns.setdefault(column.name, column)
            assert same.arrow == column.arrow, f"{topic}: {column.name} has two types"
    return tuple(columns.values())


@cache
def columns_of(cls: type[Record]) -> tuple[ArchiveColumn, ...]:
    columns: list[ArchiveColumn] = []
    for field in fields(cls):
        name = f"{field.name}_" if field.name in ENVELOPE_COLUMNS.names else field.name
        kind = field.encode_name.partition(":")[2]
        arrow = _list(_ARRAYS[kind]) if kind else _arrow(field.type)
        columns.append(
            ArchiveColumn(name, field.name, arrow, field.type, bool(kind), field.required)
        )
    return tuple(columns)


def _arrow(type_: Any) -> pa.DataType:
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Literal:
        return pa.string()
    if origin is UnionType:
        (only,) = [kind for kind in inner if kind is not NoneType]
        return _arrow(only)
    if origin is tuple:
        assert inner[1:] == (...,), f"{type_} has no column type"
        return _list(_arrow(inner[0]))
    if origin is dict:
        return pa.map_(_arrow(inner[0]), _arrow(inner[1]))
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return pa.struct([pa.field(f.name, _arrow(f.type)) for f in fields(type_)])
    return SCALARS[type_]


def _list(item: pa.DataType) -> pa.DataType:
    # So Parquet stores no null flag (definition level) per item.
    return pa.list_(pa.field("element", item, nullable=False))
