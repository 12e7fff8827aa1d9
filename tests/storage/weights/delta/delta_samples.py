"""Pairs of tensors as bytes, for the tests of the delta codec: any dtype, any bits."""

import numpy as np
from hypothesis import strategies as st

from rollstream.storage.weights.delta.coding import ELEMENTS

# Of a byte each: repeated to an element they give ±0, ±1 step, denormals, infinities and NaNs.
ODD = [0x00, 0x01, 0x7C, 0x7F, 0x80, 0x81, 0xFC, 0xFE, 0xFF]


def bits_of(dtype, data):
    return np.frombuffer(data, ELEMENTS[dtype].bits)


@st.composite
def pairs(draw):
    """A dtype, a base and its successor: nothing, little, much or all of it changed."""
    dtype = draw(st.sampled_from(sorted(ELEMENTS)))
    element = ELEMENTS[dtype]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 20_000)))
    pool = draw(st.sampled_from([ODD, list(range(256))]))
    base = random.choice(np.array(pool, np.uint8), (count, element.bytes))
    base = base.view(element.bits).reshape(-1)
    new = base.copy()
    share = draw(st.sampled_from([0, 0.0005, 0.01, 0.2, 0.9, 1]))
    where = np.flatnonzero(random.random(count) < share)
    if draw(st.booleans()):
        new[where] += random.integers(0, 4, len(where)).astype(element.bits)
    else:
        new[where] = random.choice(base, len(where))[::-1] if len(where) else 0
    return dtype, base.tobytes(), new.tobytes()


def optimiser_step(count, rate, seed=0):
    """bfloat16 bits of weights before and after a step of this size of their float32 masters; 3e-7
    changes 1.2 % of them.
    """
    random = np.random.default_rng(seed)
    masters = random.standard_normal(count, np.float32) * np.float32(0.02)
    step = random.standard_normal(count, np.float32) * np.float32(rate)
    return _bfloat16(masters), _bfloat16(masters - step)


def _bfloat16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
