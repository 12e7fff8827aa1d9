"""Every record survives the wire; no bytes cause harm."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from rollstream.errors import DecodeError, UnknownSchema
from rollstream.streams.codec import Envelope, decode, encode, envelope_of, record_hash
from rollstream.streams.records import SCHEMAS, Opened, Record, StepDone, Trajectory
from rollstream.streams.values import Version
from testbed.sample_records import SAMPLES, trajectory
from tests.streams.record_equality import differences

GOLDEN = Path(__file__).parent / "golden"
ENVELOPE = Envelope("trainer", 3, 17)
ANNOTATION = {"trajectory": "g7.0", "group": 7, "name": "n", "scorer": "s"}


def tampered(data: bytes, change: "dict[str, object] | bytes") -> bytes:
    """`data` with another header (keys replaced, or all of it) and a valid checksum."""
    (length,) = struct.unpack_from("<I", data, 4)
    header = data[16 : 16 + length]
    header = (
        change if isinstance(change, bytes) else json.dumps(json.loads(header) | change).encode()
    )
    arrays = data[(16 + length + 7) // 8 * 8 :]
    return sealed(header, arrays)


def header_of(data: bytes) -> bytes:
    return data[16 : 16 + struct.unpack_from("<I", data, 4)[0]]


def sealed(header: bytes, arrays: bytes = b"") -> bytes:
    body = header + (bytes(-len(header) % 8) + arrays if arrays else b"")
    return struct.pack("<4sIQ", b"RSR1", len(header), xxh3_64_intdigest(body)) + body


def outcome(data: bytes) -> type:
    """The class of the record, or of the error."""
    try:
        return type(decode(data).record)
    except DecodeError as error:
        return type(error)


def test_every_schema_has_a_sample_and_a_golden_file() -> None:
    assert {type(sample) for sample in SAMPLES} == set(SCHEMAS.values())
    assert {path.stem for path in GOLDEN.glob("*.bin")} == {s.replace("/", "-") for s in SCHEMAS}


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_and_its_envelope_come_back_as_they_were(record: Record) -> None:
    decoded = decode(encode(record, ENVELOPE))
    assert differences(record, decoded.record) == []
    assert decoded.envelope == ENVELOPE
    assert decode(encode(record)).envelope is None


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_golden_bytes_still_mean_the_same_record(record: Record) -> None:
    data = (GOLDEN / f"{record.schema().replace('/', '-')}.bin").read_bytes()
    assert differences(record, decode(data).record) == []
    assert decode(data).envelope == ENVELOPE


def test_encoding_is_a_function_of_the_record() -> None:
    assert encode(trajectory(64)) == encode(trajectory(64))
    assert re.fullmatch(r"[0-9a-f]{16}", record_hash(encode(trajectory(64))))


def test_arrays_are_aligned_read_only_views_of_the_bytes() -> None:
    decoded = decode(encode(trajectory(9))).record
    assert isinstance(decoded, Trajectory)
    assert all(a.ctypes.data % 8 == 0 for a in (decoded.tokens, decoded.sources, decoded.logprobs))
    with pytest.raises(ValueError, match="read-only"):
        decoded.tokens[0] = 1


def test_empty_and_strided_arrays_are_encoded() -> None:
    empty = decode(encode(trajectory(0))).record
    assert isinstance(empty, Trajectory)
    assert empty.tokens.size == empty.logprobs.size == 0
    strided = replace(trajectory(8), tokens=np.arange(16, dtype=np.uint32)[::2])
    assert differences(strided, decode(encode(strided)).record) == []


def test_nan_in_an_array_is_kept() -> None:
    record = trajectory(4)
    record.logprobs[0] = np.nan
    assert differences(record, decode(encode(record)).record) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_float_that_json_cannot_carry_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"StepDone.metrics\['loss'\] is not finite"):
        encode(StepDone(4, Version(4, 1), "ff", 2, {"loss": value}, {}, 1.0))


def test_numpy_scalars_are_numbers_in_a_header() -> None:
    done = StepDone(4, Version(4, 1), "ff", 2, {"loss": np.float32(0.5)}, {"n": np.int64(3)}, 1.0)  # type: ignore[dict-item]
    decoded = decode(encode(done)).record
    assert isinstance(decoded, StepDone)
    assert decoded.metrics == {"loss": 0.5}
    assert decoded.counts == {"n": 3}


def test_an_array_of_another_type_is_refused() -> None:
    record = replace(trajectory(4), tokens=np.arange(4))
    with pytest.raises(ValueError, match="tokens must be uint32"):
        encode(record)


def test_unknown_fields_and_arrays_of_a_newer_program_are_ignored() -> None:
    data = encode(trajectory(8))
    end = 16 + struct.unpack_from("<I", data, 4)[0]
    header = json.loads(data[16:end])
    header["record"] = {"values:f8": 2, **header["record"], "invented": {"deep": [1, 2]}}
    header["novel"] = 1
    arrays = data[(end + 7) // 8 * 8 :]
    newer = sealed(json.dumps(header).encode(), arrays + bytes(-len(arrays) % 8) + bytes(16))
    assert differences(trajectory(8), decode(newer).record) == []
    with pytest.raises(DecodeError, match="describes others"):
        decode(sealed(json.dumps(header).encode(), arrays + bytes(8)))


def test_an_unknown_schema_is_named_and_still_shows_its_envelope() -> None:
    newer = tampered(encode(Opened("trainer", 3), ENVELOPE), {"record": {"schema": "trajectory/9"}})
    with pytest.raises(UnknownSchema, match="trajectory/9"):
        decode(newer)
    assert envelope_of(newer) == ENVELOPE


@pytest.mark.parametrize(
    "change",
    [
        {"record": {"schema": "opened/1"}},
        {"record": {"schema": "opened/1", "role": 1, "term": 3}},
        {"record": {"schema": "opened/1", "role": "x", "term": 3.5}},
        {"record": {"schema": "annotation/1", **ANNOTATION, "values:f4": 1 << 39}},
        {"record": {"schema": "annotation/1", **ANNOTATION, "values:f4": -1}},
        {"record": {"schema": "annotation/1", **ANNOTATION, "values:f4": 10**30}},
        {"record": {"schema": "annotation/1", **ANNOTATION, "values:f4": [1]}},
        {"record": {"schema": "annotation/1", **ANNOTATION, "values:f4": 0, "unknown:f8": -1}},
        {"record": {"schema": 4}},
        {"envelope": {"role": "x"}},
        b"",
        b"[]",
        b"{",
        b'{"record":{"schema":"opened/1","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"record":{"schema":"opened/1","role":"\xff","term":1}}',
        b'{"record":{"schema":"opened/1","role":"x","term":' + b"9" * 10_000 + b"}}",
    ],
)
def test_a_wrong_header_is_a_decode_error(change: dict[str, object] | bytes) -> None:
    with pytest.raises(DecodeError):
        decode(tampered(encode(Opened("trainer", 3), ENVELOPE), change))


def test_a_missing_or_retyped_array_is_a_decode_error() -> None:
    data = encode(trajectory(8))
    for old, new in (
        (b'"tokens:u4":8,', b""),
        (b"tokens:u4", b"tokens:i4"),
        (b'"sources:u1":8', b'"sources:u1":16'),
    ):
        header = header_of(data)
        assert old in header
        with pytest.raises(DecodeError):
            decode(tampered(data, header.replace(old, new)))


def test_every_truncation_and_every_flipped_byte_is_noticed() -> None:
    data = encode(trajectory(8), ENVELOPE)
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode(data[:length])
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        with pytest.raises(DecodeError):
            decode(flipped)


@given(st.binary(max_size=400))
@settings(max_examples=400, deadline=None)
def test_any_bytes_give_a_record_or_a_decode_error(data: bytes) -> None:
    for candidate in (
        data,
        b"RSR1" + data,
        sealed(data),
        sealed(b'{"record":{"schema":"take/1",' + data),
    ):
        assert outcome(candidate) in {*SCHEMAS.values(), DecodeError, UnknownSchema}


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=400, deadline=None)
def test_any_change_of_a_header_gives_a_record_or_a_decode_error(
    record: Record, data: st.DataObject
) -> None:
    encoded = encode(record, ENVELOPE)
    (length,) = struct.unpack_from("<I", encoded, 4)
    at = data.draw(st.integers(0, length - 1))
    junk = data.draw(st.binary(max_size=6))
    header = (
        encoded[16 : 16 + at] + junk + encoded[16 + at + data.draw(st.integers(0, 6)) : 16 + length]
    )
    claimed = data.draw(st.integers(0, 2**32 - 1) | st.just(len(header)))
    body = header + encoded[16 + length :]
    damaged = struct.pack("<4sIQ", b"RSR1", claimed, xxh3_64_intdigest(body)) + body
    assert outcome(damaged) in {*SCHEMAS.values(), DecodeError, UnknownSchema}
