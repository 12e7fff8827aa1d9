"""The size of a delta is near the entropy of independent positions and steps."""

import numpy as np
import pytest

from rollstream.storage.weights.delta.codec import encode_tensor
from tests.storage.weights.delta.delta_samples import optimiser_step

COUNT = 1 << 21


def entropy_bytes(symbols):
    share = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return -float((share * np.log2(share)).sum()) * len(symbols) / 8


@pytest.mark.parametrize(("rate", "share", "least"), [(3e-7, 0.012, 0.95), (5e-6, 0.12, 0.93)])
def test_an_optimiser_step_takes_hardly_more_bytes_than_its_entropy(rate, share, least):
    base, new = optimiser_step(COUNT, rate)
    differs = base != new
    # Values cross zero here only by a step to the other side, so magnitudes give the steps.
    signed = [np.where(each >> 15, -(each & 0x7FFF).astype(int) - 1, each) for each in (base, new)]
    floor = entropy_bytes(differs) + entropy_bytes((signed[1] - signed[0])[differs])
    coded = encode_tensor(base.data, new.data, "BF16")
    assert abs(coded.changed / COUNT - share) < share / 10
    assert floor / len(coded.payload) >= least


@pytest.mark.parametrize("changed", [1, 3, 50, 1000, 20_000])
def test_positions_cost_near_their_entropy_at_any_density(changed):
    random = np.random.default_rng(0)
    new = np.zeros(COUNT, np.uint16)
    new[random.choice(COUNT, changed, replace=False)] = 1
    floor = entropy_bytes(new)
    payload = encode_tensor(bytes(new.nbytes), new.data, "I16").payload
    assert len(payload) <= 1.06 * floor + changed / 8 * 0.1 + 40


def test_a_tensor_of_one_element_takes_a_few_bytes():
    one, two = np.float32(1).tobytes(), np.float32(2).tobytes()
    assert len(encode_tensor(one, two, "F32").payload) <= 8
