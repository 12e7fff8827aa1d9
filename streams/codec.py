"""Records to bytes and back; any bytes whatever give a record or a `DecodeError`, in memory bounded by their length.

All numbers little-endian; offsets from the first byte:

     0   4 bytes   magic `RSR1`
     4   u32       n, length of the JSON header
     8   u64       xxh3-64 (seed 0) of all bytes from 16 on
    16   n bytes   JSON header, UTF-8
         0 to 7    zero bytes up to a multiple of 8, then each array in the order of the header, each
                   but the last padded with zero bytes up to a multiple of 8; then nothing more

The header is one object: `schema` (name with version), `fields` (all fields that are not arrays, under their own
names; objects and lists nest), and where there are any `arrays` (`"tokens:u4 logprobs:f4"`: names with NumPy kind
and item size), `counts` (their numbers of items) and `envelope` (`role`, `term`, `sequence`: records of
single-holder roles). A field that equals its default may be left out, so a schema's defaults never change. Unknown
fields and arrays are ignored; a missing field without default is a `DecodeError`, an unknown schema `UnknownSchema`.
JSON has no NaN: a float in `fields` must be finite, `encode` refuses others by name; arrays hold any value.
"""

import dataclasses
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, Union, cast

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy import frombuffer
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from streams.errors import DecodeError, UnknownSchema
from streams.layouts import LAYOUTS, ArrayField, Envelope, Layout
from streams.records import SCHEMAS, Record

__all__ = ["Decoded", "Envelope", "content_hash", "decode", "encode"]

MAGIC = b"RSR1"
_PREFIX = struct.Struct("<4sIQ")
_PADDING = tuple(bytes(-size % 8) for size in range(8))  # by size modulo 8
_WIRE_NAME = re.compile(r"(\w+):[a-z]([1248])", re.ASCII)
_IGNORED = ""  # name of arrays that this reader does not know
_LAYOUT_OF_HEADER: dict[Any, Layout] = {layout.header: layout for layout in LAYOUTS.values()}
_new: Any = object.__new__  # of any record class, without its __init__


class Decoded(msgspec.Struct, frozen=True):
    """A record, and its envelope if a single-holder role wrote it."""

    record: Record
    envelope: Envelope | None


class _SchemaOnly(msgspec.Struct):
    schema: str


def _number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise ValueError(f"a record's header cannot hold {value!r} ({type(value).__name__})")


_encoder = msgspec.json.Encoder(enc_hook=_number)
_schema_decoder = msgspec.json.Decoder(_SchemaOnly)
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    Union[tuple(_LAYOUT_OF_HEADER)]  # noqa: UP007  (one tagged union of all schemas, made at run time)
)


def content_hash(data: bytes) -> str:
    """xxh3-64 of an encoded record's bytes in hex: what the ledger names a record by."""
    return xxh3_64_hexdigest(data)


def encode(record: Record, envelope: Envelope | None = None) -> bytes:
    """The same bytes for the same record; ValueError for a wrong array or a float that JSON cannot carry."""
    layout = LAYOUTS[type(record)]
    arrays = [_checked(getattr(record, array.name), array, layout) for array in layout.arrays]
    fields = layout.fields(*layout.values(record))
    counts = tuple([array.size for array in arrays])
    header = _encoder.encode(layout.header(fields, layout.arrays_text, counts, envelope))
    if b"null" in header:
        _refuse_not_finite(record)
    parts: list[Any] = [header]
    size = len(header)
    for array in arrays:
        padding = _PADDING[size % 8]
        parts += (padding, array)
        size += len(padding) + array.nbytes
    body = b"".join(parts)
    return _PREFIX.pack(MAGIC, len(header), xxh3_64_intdigest(body)) + body


def decode(data: bytes) -> Decoded:
    """The record in `data`, checksum verified; its arrays are read-only views that keep `data` alive."""
    header, at = _header(data)
    layout = _LAYOUT_OF_HEADER[type(header)]
    record, text, arrays, fill = layout.unpacking
    if header.arrays != text:
        arrays = _arrays_named(header.arrays, layout)
    if len(arrays) != len(header.counts):
        raise DecodeError(f"{layout.schema}: {len(arrays)} arrays, {len(header.counts)} counts")
    values = asdict(header.fields)
    try:
        for (name, dtype, item_bytes), count in zip(arrays, header.counts):  # noqa: B905  (checked)
            at = (at + 7) & -8
            values[name] = frombuffer(data, dtype, count, at)
            at += count * item_bytes
    except ValueError as error:
        raise DecodeError(f"{layout.schema}: an array reaches beyond the record's end") from error
    if at != len(data):
        raise DecodeError(f"{layout.schema}: {len(data)} bytes, but its header describes {at}")
    values.pop(_IGNORED, None)
    decoded = _new(record)
    fill(decoded, values)
    return Decoded(decoded, header.envelope)


def _header(data: bytes) -> tuple[Any, int]:
    """The typed header and the offset of its end."""
    if len(data) < _PREFIX.size:
        raise DecodeError(f"{len(data)} bytes are too few for a record")
    magic, length, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise DecodeError(f"starts with {magic!r}, a record with {MAGIC!r}")
    if xxh3_64_intdigest(memoryview(data)[_PREFIX.size :]) != checksum:
        raise DecodeError("checksum differs: the bytes changed after they were written")
    end = _PREFIX.size + length
    if end > len(data):
        raise DecodeError(f"header of {length} bytes in a record of {len(data)}")
    try:
        return _decoder.decode(data[_PREFIX.size : end]), end
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _header_error(data[_PREFIX.size : end], error) from error


def _header_error(header: bytes, error: Exception) -> DecodeError:
    try:
        schema = _schema_decoder.decode(header).schema
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return DecodeError(f"header: {error}")
    if schema not in SCHEMAS:
        return UnknownSchema(f"schema {schema!r} is not known here; a newer program may read it")
    return DecodeError(f"{schema}: {error}")


def _arrays_named(text: str, layout: Layout) -> tuple[tuple[str, Any, int], ...]:
    """Arrays as another version of the schema lists them; those unknown here keep their place, unnamed."""
    known = {array.name: array for array in layout.arrays}
    arrays: list[tuple[str, Any, int]] = []
    for wire_name in text.split(" ") if text else ():
        match = _WIRE_NAME.fullmatch(wire_name)
        if match is None:
            raise DecodeError(f"{layout.schema}: {wire_name!r} is not an array's name and type")
        array = known.pop(match[1], None)
        if array is not None and array.wire_name != wire_name:
            raise DecodeError(f"{layout.schema}: {wire_name!r} where {array.wire_name!r} belongs")
        item_bytes = int(match[2])
        dtype = np.dtype(f"V{item_bytes}") if array is None else array.dtype
        arrays.append((_IGNORED if array is None else array.name, dtype, item_bytes))
    for array in known.values():
        if not array.optional:
            raise DecodeError(f"{layout.schema}: array {array.wire_name!r} is missing")
    return tuple(arrays)


def _checked(value: NDArray[Any], array: ArrayField, layout: Layout) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype != array.dtype or value.ndim != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = (
            f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value)
        )  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{layout.schema}: {array.name} must be 1-d {array.dtype}, not {found}")
    return value if value.flags.c_contiguous else value.copy()


def _refuse_not_finite(record: Record) -> None:
    """msgspec writes NaN and infinities as null, as it does None: only None may be there."""
    for path in _not_finite(record, type(record).__name__):
        raise ValueError(f"{path} is not finite; a record's header cannot hold NaN or infinity")


def _not_finite(value: object, path: str) -> Iterator[str]:
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            yield path
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _not_finite(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(cast("tuple[object, ...]", value)):
            yield from _not_finite(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _not_finite(getattr(value, field.name), f"{path}.{field.name}")
