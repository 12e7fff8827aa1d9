"""Damaged payloads: `CorruptObject` or a change within bounds, and nothing written before."""

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from rollstream.errors import CorruptObject
from rollstream.storage.weights.delta.codec import apply_tensor, encode_tensor
from rollstream.storage.weights.delta.coding import ELEMENTS, StreamReader, StreamWriter
from tests.storage.weights.delta.delta_samples import optimiser_step, pairs

CODINGS = [("sparse", "ulp"), ("sparse", "absolute"), ("dense", ""), ("same", "")]


def applied_or_refused(coding, values, payload, base, dtype):
    """The tensor after it; equal to the base if the payload was refused."""
    into = bytearray(base)
    try:
        changes = apply_tensor(coding, values, payload, into, dtype)
    except CorruptObject:
        assert into == base
        return
    assert len(into) == len(base)
    if changes is not None:
        assert np.all(np.diff(changes.indices) > 0)
        assert not len(changes.indices) or changes.indices[0] >= 0
        old, now = (np.frombuffer(each, ELEMENTS[dtype].bits) for each in (base, into))
        patched = old.copy()
        patched[changes.indices] = changes.values
        assert np.array_equal(patched, now)


@given(st.sampled_from(CODINGS), st.binary(max_size=200), pairs())
@settings(max_examples=500, deadline=None)
def test_random_bytes_are_refused_or_stay_within_the_tensor(coding, payload, pair):
    dtype, base, _ = pair
    applied_or_refused(*coding, payload, base, dtype)  # pyright: ignore[reportCallIssue]


@given(pairs(), st.data())
@settings(max_examples=500, deadline=None)
def test_a_payload_with_other_bytes_in_it_is_refused_or_stays_within_the_tensor(pair, data):
    dtype, base, new = pair
    coded = encode_tensor(base, new, dtype)
    payload = bytearray(coded.payload)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload)))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    applied_or_refused(coded.coding, coded.values, bytes(payload), base, dtype)


@st.composite
def payloads(draw):
    """Numbers and streams in any order, each well-formed: payloads that pass the first checks."""
    writer = StreamWriter()
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            writer.number(draw(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1))))
        else:
            data = draw(
                st.one_of(st.binary(max_size=6), st.sampled_from([b"\xff", b"\x00", b"\x01"]))
            )
            writer.stream(np.frombuffer(data * draw(st.integers(1, 9)), np.uint8))
    return writer.finish()


@given(st.sampled_from(CODINGS), payloads(), st.sampled_from(sorted(ELEMENTS)), st.integers(0, 20))
@settings(max_examples=500, deadline=None)
def test_numbers_and_streams_at_random_are_refused_or_stay_within_the_tensor(
    coding, payload, dtype, elements
):
    base = bytes(elements * ELEMENTS[dtype].bytes)
    applied_or_refused(*coding, payload, base, dtype)  # pyright: ignore[reportCallIssue]


@given(pairs(), st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_a_payload_of_another_tensor_is_refused_or_stays_within_this_one(pair, elements):
    dtype, base, new = pair
    coded = encode_tensor(base, new, dtype)
    other = bytes(elements * ELEMENTS[dtype].bytes)
    applied_or_refused(coded.coding, coded.values, coded.payload, other, dtype)


@pytest.mark.parametrize("rate", [1e-6, 1e-2])
def test_every_shortened_payload_is_refused(rate):
    base, new = optimiser_step(400, rate)
    coded = encode_tensor(base.data, new.data, "BF16")
    for end in range(len(coded.payload)):
        into = bytearray(base)
        with pytest.raises(CorruptObject, match="nothing was written"):
            apply_tensor(coded.coding, coded.values, coded.payload[:end], into, "BF16")
        assert into == base.tobytes()


def test_bytes_after_the_payload_are_refused():
    base, new = optimiser_step(4000, 1e-6)
    coded = encode_tensor(base.data, new.data, "BF16")
    with pytest.raises(CorruptObject, match="1 bytes too many"):
        apply_tensor(coded.coding, coded.values, coded.payload + b"x", bytearray(base), "BF16")


def test_a_position_past_the_end_is_refused_before_anything_is_written():
    base, new = np.zeros(1000, np.uint16), np.zeros(1000, np.uint16)
    new[[3, 999]] = 1
    coded = encode_tensor(base.data, new.data, "BF16")
    into = bytearray(999 * 2)
    with pytest.raises(CorruptObject, match="past the end"):
        apply_tensor(coded.coding, coded.values, coded.payload, into, "BF16")
    assert into == bytes(999 * 2)


@pytest.mark.parametrize(
    ("coding", "values", "dtype", "message"),
    [
        ("sparse", "", "F32", "unknown here"),
        ("dense", "ulp", "F32", "unknown here"),
        ("zipped", "", "F32", "unknown here"),
        ("sparse", "ulp", "F4", "dtype 'F4', unknown here"),
        ("same", "", "F32", "where nothing changed"),
    ],
)
def test_what_this_version_does_not_know_is_refused_by_name(coding, values, dtype, message):
    with pytest.raises(CorruptObject, match=message):
        apply_tensor(coding, values, b"\x00", bytearray(8), dtype)


@pytest.mark.parametrize("honest", [True, False])
def test_a_stream_that_would_unfold_to_gigabytes_costs_no_memory(honest):
    compressor = zstandard.ZstdCompressor(write_content_size=honest)
    bomb = compressor.compress(bytes(64 << 20))
    writer = StreamWriter()
    writer.number(len(bomb) * 2 + 1)
    payload = writer.finish() + bomb
    tracemalloc.start()
    with pytest.raises(CorruptObject):
        StreamReader(payload).stream(len(bomb))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_number_without_end_and_one_that_is_too_large_are_refused():
    with pytest.raises(CorruptObject, match="without end"):
        StreamReader(b"\xff" * 20).number(1 << 63)
    with pytest.raises(CorruptObject, match="at most 5"):
        StreamReader(b"\x06").number(5)
