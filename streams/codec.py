"""Records to bytes and back; any bytes whatever give a record or a `DecodeError`, in memory bounded
by their length.

All numbers little-endian; offsets from the first byte:

     0   4 bytes   magic `RSR1`
     4   u32       n, length of the JSON header
     8   u64       xxh3-64 (seed 0) of all bytes from 16 on
    16   n bytes   JSON header, UTF-8
         0 to 7    zero bytes up to a multiple of 8, then each array in the order of the header,
         each but the last padded with zero bytes up to a multiple of 8; then nothing more

The header is one object: `schema` (name with version), `fields` (all fields that are not arrays,
under their own names; objects and lists nest), and where there are any `arrays` (`"tokens:u4
logprobs:f4"`: names with NumPy kind and item size), `counts` (their numbers of items) and
`envelope` (`role`, `term`, `sequence`: records of single-holder roles). A field that equals its
default may be left out, so a schema's defaults never change. Unknown fields and arrays are ignored;
a missing field without default is a `DecodeError`, an unknown schema `UnknownSchema`. JSON has no
NaN: a float in `fields` must be finite, `encode` refuses others by name; arrays hold any value.
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
from numpy import frombuffer, ndarray
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from streams.errors import DecodeError, UnknownSchema
from streams.layouts import LAYOUTS, Envelope, Layout
from streams.records import SCHEMAS, Record

__all__ = ["Decoded", "Envelope", "content_hash", "decode", "encode", "envelope_of"]

MAGIC = b"RSR1"
LARGE_BYTES = 1 << 15  # above it one copy less is worth hashing in pieces (measured: 5.1 to 3.8 µs)
_PREFIX = struct.Struct("<4sIQ")
_PADDING = tuple(bytes(-size % 8) for size in range(8))  # by size modulo 8
_WIRE_NAME = re.compile(r"(\w+):[a-z]([1248])", re.ASCII)
_JSON_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_IGNORED = ""  # name of arrays that this reader does not know
_LAYOUT_OF_HEADER: dict[Any, Layout] = {layout.header: layout for layout in LAYOUTS.values()}
_UNPACKING: dict[Any, Any] = {layout.header: layout.unpacking for layout in LAYOUTS.values()}
_new: Any = object.__new__  # of any record class, without its __init__


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """A record, and its envelope if a single-holder role wrote it."""

    record: Record
    envelope: Envelope | None


class _AnyHeader(msgspec.Struct):
    schema: str
    envelope: Envelope | None = None


def _number(value: object) -> object:
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    raise ValueError(f"a record's header cannot hold {value!r} ({type(value).__name__})")


_encoder = msgspec.json.Encoder(enc_hook=_number)
_any_decoder = msgspec.json.Decoder(_AnyHeader)
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    Union[tuple(_LAYOUT_OF_HEADER)]  # noqa: UP007  (one tagged union of all schemas, made at run time)
)


def content_hash(data: bytes) -> str:
    """xxh3-64 of an encoded record's bytes in hex: what the ledger names a record by."""
    return xxh3_64_hexdigest(data)


def encode(record: Record, envelope: Envelope | None = None) -> bytes:
    """The same bytes for the same record; ValueError for a wrong array or a float JSON has not."""
    layout = LAYOUTS[type(record)]
    counts: list[int] = []
    parts: list[Any] = [b""]
    size = total = 0
    for name, dtype, item_bytes in layout.unpacking[2]:
        array = getattr(record, name)
        if type(array) is not ndarray or array.dtype is not dtype or array.strides != (item_bytes,):
            array = _array(array, name, dtype, layout)
        count = len(array)
        counts.append(count)
        parts += (_PADDING[size % 8], array)
        size = count * item_bytes
        total += size
    fields = layout.fields(*layout.values(record))
    header = _encoder.encode(layout.header(fields, layout.arrays_text, tuple(counts), envelope))
    if b"null" in header:
        _refuse_not_finite(record)
    parts[0] = header + _PADDING[len(header) % 8] if counts else header
    if total > LARGE_BYTES:
        hasher = xxh3_64()
        for part in parts:
            hasher.update(part)
        return b"".join([_PREFIX.pack(MAGIC, len(header), hasher.intdigest()), *parts])
    body = b"".join(parts)
    return _PREFIX.pack(MAGIC, len(header), xxh3_64_intdigest(body)) + body


def decode(data: bytes) -> Decoded:
    """The record in `data`, checksum verified; its arrays are read-only views that hold `data`."""
    head = _header_bytes(data)
    try:
        header = _decoder.decode(head)
    except _JSON_ERRORS as error:
        raise _header_error(head, error) from error
    record, text, arrays, fill = _UNPACKING[type(header)]
    values = asdict(header.fields)
    counts = header.counts
    if header.arrays != text:
        arrays = _arrays_named(header.arrays, _LAYOUT_OF_HEADER[type(header)])
        values[_IGNORED] = None
    if len(arrays) != len(counts):
        raise DecodeError(f"{record.SCHEMA}: {len(arrays)} arrays, {len(counts)} counts")
    at = _PREFIX.size + len(head)
    try:
        for (name, dtype, item_bytes), count in zip(arrays, counts):  # noqa: B905  (checked)
            at = (at + 7) & -8
            values[name] = frombuffer(data, dtype, count, at)
            at += count * item_bytes
    except ValueError as error:
        raise DecodeError(f"{record.SCHEMA}: an array reaches beyond the record's end") from error
    if at != len(data):
        raise DecodeError(f"{record.SCHEMA}: {len(data)} bytes, but its header describes {at}")
    if header.arrays != text:
        del values[_IGNORED]
    decoded = _new(record)
    fill(decoded, values)
    return Decoded(decoded, header.envelope)


def envelope_of(data: bytes) -> Envelope | None:
    """The envelope of a record whose schema or fields this reader need not know; None without one.

    `DecodeError` if the bytes are damaged or no record at all.
    """
    try:
        return _any_decoder.decode(_header_bytes(data)).envelope
    except _JSON_ERRORS as error:
        raise DecodeError(f"header: {error}") from error


def _header_bytes(data: bytes) -> bytes:
    """The JSON of a record whose magic, checksum and length are right."""
    if len(data) < _PREFIX.size:
        raise DecodeError(f"{len(data)} bytes are too few for a record")
    magic, length, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise DecodeError(f"starts with {magic!r}, a record with {MAGIC!r}")
    if xxh3_64_intdigest(memoryview(data)[_PREFIX.size :]) != checksum:
        raise DecodeError("checksum differs: the bytes changed after they were written")
    if _PREFIX.size + length > len(data):
        raise DecodeError(f"header of {length} bytes in a record of {len(data)}")
    return data[_PREFIX.size : _PREFIX.size + length]


def _header_error(header: bytes, error: Exception) -> DecodeError:
    try:
        schema = _any_decoder.decode(header).schema
    except _JSON_ERRORS:
        return DecodeError(f"header: {error}")
    if schema not in SCHEMAS:
        return UnknownSchema(f"schema {schema!r} is not known here; a newer program may read it")
    return DecodeError(f"{schema}: {error}")


def _arrays_named(text: str, layout: Layout) -> tuple[tuple[str, Any, int], ...]:
    """Arrays as another version of the schema lists them; those unknown here keep their place,
    unnamed.
    """
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


def _array(value: Any, name: str, dtype: np.dtype[Any], layout: Layout) -> NDArray[Any]:
    """`value` as a contiguous array of `dtype`; only what is one already but for its strides."""
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{layout.schema}: {name} must be an array, not {value!r}")
    array = cast("NDArray[Any]", value)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(
            f"{layout.schema}: {name} must be {dtype} of one dimension, "
            f"not {array.dtype} of {array.ndim}"
        )
    return array if array.flags.c_contiguous else array.copy()


def _refuse_not_finite(record: Record) -> None:
    """msgspec writes NaN and infinities as null, as it does None: only None may be there."""
    for path in _not_finite(record, type(record).__name__):
        raise ValueError(f"{path} is not finite; a record's header cannot hold NaN or infinity")


def _not_finite(value: object, path: str) -> Iterator[str]:
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(float(cast(float, value))):
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
