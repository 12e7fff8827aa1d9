"""The delta codec restores every bit of every dtype, in place, and reports the changes."""

import numpy as np
import pytest
from hypothesis import given, settings

from rollstream.storage.weights.delta.codec import apply_tensor, encode_tensor, encode_whole
from rollstream.storage.weights.delta.coding import ELEMENTS, Changes, squash
from rollstream.storage.weights.delta.sparse import SEGMENT
from rollstream.storage.weights.tensors import DTYPES
from tests.storage.weights.delta.delta_samples import bits_of, optimiser_step, pairs


def applied(coded, base, dtype):
    into = bytearray(base)
    changes = apply_tensor(coded.coding, coded.values, coded.payload, into, dtype)
    return bytes(into), changes


def test_every_dtype_of_a_version_has_a_coding():
    assert set(ELEMENTS) == set(DTYPES)
    assert all(DTYPES[name].itemsize == element.bytes for name, element in ELEMENTS.items())


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_any_bits_become_any_other_bits(pair):
    dtype, base, new = pair
    coded = encode_tensor(base, new, dtype)
    got, changes = applied(coded, base, dtype)
    assert got == new
    old, now = bits_of(dtype, base), bits_of(dtype, new)
    where = np.flatnonzero(old != now)
    assert coded.changed == (len(now) if coded.coding == "dense" else len(where))
    if changes is None:
        assert coded.coding == "dense" or 2 * len(where) > len(now)
    else:
        assert np.array_equal(changes.indices, where)
        assert np.array_equal(changes.values, now[where])
        assert changes.values.dtype == now.dtype


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_a_whole_tensor_needs_no_base(pair):
    dtype, base, new = pair
    coded = encode_whole(new, dtype)
    assert (coded.coding, coded.values) == ("dense", "")
    assert applied(coded, base, dtype) == (new, None)


@pytest.mark.parametrize(("dtype", "width"), [("F8_E5M2", 1), ("F16", 2), ("BF16", 2)])
def test_every_pattern_of_a_small_float_goes_one_up_one_down_and_to_its_negative(dtype, width):
    every = np.arange(1 << 8 * width, dtype=f"<u{width}")
    for new in (
        np.roll(every, 1),
        np.roll(every, -1),
        every ^ every.dtype.type(128 << 8 * width - 8),
    ):
        sparse = every.copy()
        sparse[::5] = new[::5]
        for target in (new, sparse):
            coded = encode_tensor(every.data, target.data, dtype)
            assert applied(coded, every, dtype)[0] == target.tobytes()


# Elements 1 and 3 of four, one step up and three down: the stored format.
STORED = bytes.fromhex("02 00 02 04 0101 0202 0202 01 0201")


def test_a_stored_payload_stays_readable():
    into = np.array([0x3F80, 0x4000, 0x8000, 0x0000], np.uint16)
    changes = apply_tensor("sparse", "ulp", STORED, into.view(np.uint8), "BF16")
    assert into.tolist() == [0x3F80, 0x4001, 0x8000, 0x8002]
    assert changes.indices.tolist() == [1, 3]  # pyright: ignore[reportOptionalMemberAccess]
    assert changes.values.tolist() == [0x4001, 0x8002]  # pyright: ignore[reportOptionalMemberAccess]


def test_equal_bits_are_the_same_though_nan_differs_from_itself():
    nan = np.full(10, np.nan, np.float32).tobytes()
    coded = encode_tensor(nan, nan, "F32")
    assert (coded.coding, coded.changed, coded.payload) == ("same", 0, b"")
    got, changes = applied(coded, nan, "F32")
    assert got == nan
    assert len(changes.indices) == len(changes.values) == 0  # pyright: ignore[reportOptionalMemberAccess]


def test_a_zero_that_changed_its_sign_is_one_change():
    base, new = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    new[500] = -0.0
    coded = encode_tensor(base.data, new.data, "F32")
    assert (coded.coding, coded.changed) == ("sparse", 1)
    changes = applied(coded, base, "F32")[1]
    assert changes.indices.tolist() == [500]  # pyright: ignore[reportOptionalMemberAccess]
    assert changes.values.tolist() == [0x8000_0000]  # pyright: ignore[reportOptionalMemberAccess]


def test_changes_on_both_sides_of_a_border_between_segments():
    base = np.zeros(2 * SEGMENT + 5, np.uint8)
    new = base.copy()
    where = [0, SEGMENT - 1, SEGMENT, 2 * SEGMENT - 1, 2 * SEGMENT + 4]
    new[where] = [1, 2, 3, 255, 128]
    coded = encode_tensor(base.data, new.data, "U8")
    got, changes = applied(coded, base, "U8")
    assert got == new.tobytes()
    assert changes.indices.tolist() == where  # pyright: ignore[reportOptionalMemberAccess]
    assert len(coded.payload) < 100


def test_unaligned_memory_is_read_and_written_in_place():
    base, new = (
        np.frombuffer(b"x" + each.tobytes(), np.uint8) for each in optimiser_step(9999, 1e-6)
    )
    coded = encode_tensor(base.data[1:], new.data[1:], "BF16")
    into = base.copy()
    apply_tensor(coded.coding, coded.values, coded.payload, into[1:], "BF16")
    assert np.array_equal(into, new)


def test_values_are_steps_after_an_optimiser_and_absolute_after_a_draw_from_few():
    base, new = optimiser_step(100_000, 1e-6)
    assert encode_tensor(base.data, new.data, "BF16").values == "ulp"
    random = np.random.default_rng(1)
    base = random.integers(0, 2**32, 100_000, np.uint32)
    new = base.copy()
    new[::50] = 7
    coded = encode_tensor(base.data, new.data, "F32")
    assert coded.values == "absolute"
    assert applied(coded, base, "F32")[0] == new.tobytes()


def test_a_redrawn_tensor_is_dense_and_hardly_larger_than_its_bytes():
    base, new = np.random.default_rng(0).integers(0, 2**16, (2, 50_000), np.uint16)
    coded = encode_tensor(base.data, new.data, "BF16")
    assert coded.coding == "dense"
    assert len(coded.payload) <= new.nbytes + 16


def test_a_float32_tensor_that_moved_everywhere_is_encoded_as_steps():
    base = np.random.default_rng(0).standard_normal(100_000, np.float32)
    new = base - np.float32(1e-5) * np.random.default_rng(1).standard_normal(100_000, np.float32)
    coded = encode_tensor(base.data, new.data, "F32")
    assert (coded.coding, coded.values) == ("sparse", "ulp")
    assert len(coded.payload) < 0.6 * new.nbytes
    assert applied(coded, base, "F32") == (new.tobytes(), None)


def test_several_steps_squash_to_one_in_which_the_later_wins():
    states = [np.zeros(100, np.uint16)]
    random = np.random.default_rng(2)
    steps = []
    for _ in range(4):
        new = states[-1].copy()
        new[random.integers(0, 100, 9)] += 1
        coded = encode_tensor(states[-1].data, new.data, "BF16")
        steps.append(applied(coded, states[-1], "BF16")[1])
        states.append(new)
    whole = squash(steps)
    patched = states[0].copy()
    patched[whole.indices] = whole.values
    assert np.array_equal(patched, states[-1])
    assert np.all(np.diff(whole.indices) > 0)


def test_squashing_nothing_changed_is_nothing_changed():
    none = Changes(np.zeros(0, np.int64), np.zeros(0, np.uint16))
    assert len(squash([none, none]).indices) == 0
