"""Encodes records to bytes and decodes them (docs/reference/wire-format.md): a prefix with a
checksum, a JSON header, and arrays, aligned to 8 bytes. Any bytes decode to a record or raise
`DecodeError`, in memory that is bounded by their length.
"""

import math
import re
import struct
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np
from msgspec.structs import fields, force_setattr
from numpy import frombuffer, ndarray
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from rollstream.errors import DecodeError, UnknownSchema
from rollstream.streams.foreign_text import reason_text
from rollstream.streams.records import SCHEMAS, Claim, Record

__all__ = [
    "Decoded",
    "Envelope",
    "decode",
    "encode",
    "encoding_problem",
    "envelope_of",
    "header_bytes",
    "is_canonical",
    "record_hash",
]

MAGIC = b"RSR1"
CLAIM_START = b'{"record":{"schema":"claim/1"'  # how the header of a `Claim` (claim check) begins
LARGE_BYTES = 1 << 15  # above this, hashing in pieces saves one copy (measured: 5.1 to 3.8 µs)
_PREFIX = struct.Struct("<4sIQ")  # magic, header's length, xxh3-64 (seed 0) of all bytes from 16 on
_PREFIX_BYTES = _PREFIX.size
_PADDING = tuple(bytes(-size % 8) for size in range(8))  # by size modulo 8: zeros to fill up
_ARRAY_KEY = re.compile(r"\w+:[a-z]([1248])", re.ASCII)  # an array in the header, as `tokens:u4`
_JSON_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """The role, the holder's term, and a sequence number, which counts the term's records in the
    partition from 0 (`Opened`) on.
    """

    role: str
    term: int
    sequence: int


# A field that equals its default is absent from the header (`omit_defaults`), so the defaults of a
# schema must never change.
class Decoded(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The header is this struct as JSON."""

    record: Record
    envelope: Envelope | None = None


# The parts of a header that can be read although the schema is unknown.
class _AnyRecord(msgspec.Struct):
    schema: str


class _AnyHeader(msgspec.Struct):
    record: _AnyRecord
    envelope: Envelope | None = None


def _arrays_of(schema: type[Record]) -> tuple[tuple[str, np.dtype[Any], int, bool], ...]:
    """Returns name, dtype, bytes per item, and whether it may be None, of each field whose key in
    the header ends in NumPy's kind and item size (`tokens:u4`).
    """
    # The arrays follow the header in the order of the class; those of a newer release come after
    # them.
    keys = [(field, field.encode_name.partition(":")[2]) for field in fields(schema)]
    dtypes = [(field, np.dtype(f"<{kind}")) for field, kind in keys if kind]
    return tuple(
        (field.name, dtype, dtype.itemsize, field.default is None) for field, dtype in dtypes
    )


_ARRAYS = {schema: _arrays_of(schema) for schema in SCHEMAS.values()}


def _plain(value: object) -> object:
    if isinstance(value, ndarray):
        return len(cast("NDArray[Any]", value))
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    raise ValueError(f"a record's header cannot hold {value!r} ({type(value).__name__})")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(Decoded)
_any_decoder = msgspec.json.Decoder(_AnyHeader)


def record_hash(data: bytes) -> str:
    """Returns the xxh3-64 of the bytes in hex, by which the ledger names records."""
    return xxh3_64_hexdigest(data)


def encode(record: Record, envelope: Envelope | None = None) -> bytes:
    """Returns the bytes; equal records give equal bytes. Raises ValueError, which names the field,
    for an array of the wrong type, for a NaN or an infinity outside of arrays, and for a text that
    UTF-8 cannot encode; no other error. Every record that `decode` returns can be encoded.
    """
    parts: list[Any] = [b""]
    size = total = 0
    for name, dtype, item_bytes, is_optional in _ARRAYS[type(record)]:
        array = getattr(record, name)
        if is_optional and array is None:
            continue
        if type(array) is not ndarray or array.dtype is not dtype or array.strides != (item_bytes,):
            array = _array(array, f"{record.schema()}: {name}", dtype)
        parts += (_PADDING[size % 8], array)
        size = len(array) * item_bytes
        total += size
    try:
        header = _encoder.encode(Decoded(record, envelope))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _unencodable(record, error) from error
    # JSON has neither NaN nor infinity; msgspec writes `null` for them as for None.
    if b"null" in header:
        _refuse_not_finite(record)
    parts[0] = header + _PADDING[len(header) % 8] if len(parts) > 1 else header
    if total > LARGE_BYTES:
        hasher = xxh3_64()
        for part in parts:
            hasher.update(part)
        return b"".join([_PREFIX.pack(MAGIC, len(header), hasher.intdigest()), *parts])
    body = b"".join(parts)
    return _PREFIX.pack(MAGIC, len(header), xxh3_64_intdigest(body)) + body


def decode(data: bytes) -> Decoded:
    """Verifies the checksum; the record's arrays are read-only views of `data`. Unknown fields and
    arrays are ignored. Raises `UnknownSchema` for an unknown schema, and another `DecodeError` for
    damaged bytes or a missing field that has no default.
    """
    head = _checked_header(data)
    try:
        decoded = _decoder.decode(head)
    except _JSON_ERRORS as error:
        raise _header_error(head, error) from error
    record, at = decoded.record, _PREFIX_BYTES + len(head)
    # Readers recognise a claim by these bytes alone (`storage/claim_check.py`).
    if data.startswith(CLAIM_START, _PREFIX_BYTES) and type(record) is not Claim:
        raise DecodeError("header: a claim and another record under the key `record` twice")
    try:
        for name, dtype, item_bytes, is_optional in _ARRAYS[type(record)]:
            count = getattr(record, name)
            if is_optional and count is None:
                continue
            at = (at + 7) & -8
            force_setattr(record, name, frombuffer(data, dtype, count, at))
            at += count * item_bytes
    except ValueError as error:
        raise DecodeError(f"{record.schema()}: an array reaches beyond its end") from error
    if at != len(data) and at + _unknown_bytes(head, type(record), at) != len(data):
        raise DecodeError(f"{record.schema()}: {len(data)} bytes, but its header describes others")
    return decoded


def is_canonical(data: bytes, decoded: Decoded) -> bool:
    """Returns whether `encode` would give exactly the bytes from which `decoded` was decoded."""
    head = _encoder.encode(decoded)
    end = _PREFIX_BYTES + len(head)
    if data[_PREFIX_BYTES:end] != head:
        return False
    padding: list[bytes] = []
    for name, _, item_bytes, is_optional in _ARRAYS[type(decoded.record)]:
        array = getattr(decoded.record, name)
        if is_optional and array is None:
            continue
        start = (end + 7) & -8
        padding.append(data[end:start])
        end = start + len(array) * item_bytes
    return end == len(data) and not any(b"".join(padding))


def header_bytes(data: bytes) -> bytes:
    """Returns the JSON header of an encoded record, which must be valid: nothing is checked."""
    return data[_PREFIX_BYTES : _PREFIX_BYTES + int.from_bytes(data[4:8], "little")]


def envelope_of(data: bytes) -> Envelope | None:
    """Returns the envelope, None without one; the record's schema and fields may be unknown to this
    release. Raises `DecodeError` for bytes that are not a record.
    """
    try:
        return _any_decoder.decode(_checked_header(data)).envelope
    except _JSON_ERRORS as error:
        raise DecodeError(f"header: {error}") from error


def _checked_header(data: bytes) -> memoryview:
    if len(data) < _PREFIX_BYTES:
        raise DecodeError(f"{len(data)} bytes are too few for a record")
    magic, length, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise DecodeError(f"starts with {magic!r}, a record with {MAGIC!r}")
    body = memoryview(data)[_PREFIX_BYTES:]
    if xxh3_64_intdigest(body) != checksum:
        raise DecodeError("checksum differs: the bytes changed after they were written")
    if length > len(body):
        raise DecodeError(f"header of {length} bytes in a record of {len(data)}")
    return body[:length]


def _header_error(header: memoryview, error: Exception) -> DecodeError:
    try:
        schema = _any_decoder.decode(header).record.schema
    except _JSON_ERRORS:
        return DecodeError(f"header: {error}")
    if schema not in SCHEMAS:
        return UnknownSchema(f"schema {schema!r} is not known here; a newer program may read it")
    return DecodeError(f"{schema}: {error}")


def _unknown_bytes(header: memoryview, schema: type[Record], at: int) -> int:
    encoded_names = {field.encode_name for field in fields(schema)}
    try:
        record = msgspec.json.decode(header, type=dict[str, Any])["record"]
    except _JSON_ERRORS as error:
        raise DecodeError(f"{schema.schema()}: {error}") from error
    # Arrays after byte `at`, of a newer release, with padding.
    end = at
    for key, count in record.items():
        match = _ARRAY_KEY.fullmatch(key)
        if match is not None and key not in encoded_names:
            if type(count) is not int or count < 0:
                raise DecodeError(f"{schema.schema()}: {key} has {count!r} items")
            end = ((end + 7) & -8) + count * int(match[1])
    return end - at


def _array(value: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns a contiguous array; only the memory layout is converted. Raises ValueError, which
    begins with `name`, unless `value` is an array of one dimension and of `dtype`.
    """
    if not isinstance(value, ndarray):
        raise ValueError(f"{name} must be an array, not {value!r}")
    array = cast("NDArray[Any]", value)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(
            f"{name} must be {dtype} of one dimension, not {array.dtype} of {array.ndim}"
        )
    return array if array.flags.c_contiguous else array.copy()


def encoding_problem(record: Record) -> str:
    try:
        encode(record)
    except ValueError as error:
        return reason_text(error)
    return ""


def _unencodable(record: Record, error: Exception) -> ValueError:
    for name in record.__struct_fields__:
        try:
            _encoder.encode(getattr(record, name))
        except (ValueError, TypeError, OverflowError, RecursionError) as reason:
            return ValueError(f"{record.schema()}: {name} cannot be encoded: {reason}")
    return ValueError(f"{record.schema()} cannot be encoded: {error}")


def _refuse_not_finite(record: Record) -> None:
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
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _not_finite(getattr(value, name), f"{path}.{name}")
