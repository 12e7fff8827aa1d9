"""How each record class lies on the wire, derived once from its dataclass.

A `Layout` holds what `codec.py` needs to encode and decode one schema without looking at
annotations again: which fields are arrays and of which dtype, and a msgspec type for the JSON
header with exactly the annotated types, so a wrong type in a header is an error. Array fields are
those annotated `NDArray[...]`; all others go into the header.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from streams.records import SCHEMAS

ARRAY_ITEMS_MAX = (
    1 << 40
)  # keeps count * itemsize far from overflow; the buffer's length is the real bound
Count = Annotated[int, msgspec.Meta(ge=0, le=ARRAY_ITEMS_MAX)]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who wrote a record of a single-holder role: sequence numbers count from 0 (`Opened`) per
    (term, partition).
    """

    role: str
    term: int
    sequence: int


@dataclass(frozen=True, slots=True)
class ArrayField:
    """One array field; an `optional` one has a default and may be missing on the wire."""

    name: str
    dtype: np.dtype[Any]
    optional: bool

    @property
    def wire_name(self) -> str:
        return f"{self.name}:{self.dtype.str[1:]}"


@dataclass(frozen=True, slots=True)
class Layout:
    """One schema: its class, its arrays, the msgspec types of its header and of the fields in it.

    `header` takes (fields, arrays text, counts, envelope); `unpacking` is what `decode` needs per
    record: the class, the usual text, (name, dtype, item bytes) per array, and the setter of an
    instance's `__dict__`.
    """

    schema: str
    arrays: tuple[ArrayField, ...]
    arrays_text: str
    header: type[Any]
    fields: type[Any]
    values: Callable[[Any], tuple[Any, ...]]
    unpacking: tuple[
        type, str, tuple[tuple[str, np.dtype[Any], int], ...], Callable[[Any, Any], None]
    ]


def layout_of(schema: str, record: type) -> Layout:
    """Reads the class once; a default is a plain value, because it never changes (`codec.py`)."""
    hints = get_type_hints(record)
    arrays: list[ArrayField] = []
    others: list[Any] = []
    for field in fields(record):
        assert field.default_factory is MISSING, f"{schema}.{field.name}: default must be a value"
        name, hint, optional = field.name, hints[field.name], field.default is not MISSING
        if get_origin(hint) is np.ndarray:
            dtype = np.dtype(get_args(get_args(hint)[1])[0]).newbyteorder("<")
            arrays.append(ArrayField(name, dtype, optional))
        else:
            others.append((name, hint, field.default) if optional else (name, hint))
    wire_fields = msgspec.defstruct("Fields", others, omit_defaults=True, gc=False)
    text = " ".join(array.wire_name for array in arrays)
    return Layout(
        schema,
        tuple(arrays),
        text,
        _header(schema, wire_fields),
        wire_fields,
        _values([other[0] for other in others]),
        (
            record,
            text,
            tuple((array.name, array.dtype, array.dtype.itemsize) for array in arrays),
            record.__dict__["__dict__"].__set__,
        ),
    )


def _header(schema: str, wire_fields: type) -> type[Any]:
    wire: list[Any] = [
        ("fields", wire_fields),
        ("arrays", str, ""),
        ("counts", tuple[Count, ...], ()),
        ("envelope", Envelope | None, None),
    ]
    return msgspec.defstruct(
        "Header", wire, tag_field="schema", tag=schema, omit_defaults=True, gc=False
    )


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


LAYOUTS: dict[type, Layout] = {cls: layout_of(schema, cls) for schema, cls in SCHEMAS.items()}
"""Record class → its layout."""
