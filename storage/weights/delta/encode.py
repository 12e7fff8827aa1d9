"""Chooses the smallest coding for one tensor: unchanged, a sparse difference, or all new bytes.

Pure functions of bytes, bit-exact for every pattern of every dtype.
"""

import numpy as np

from rollstream.storage.weights.delta.coding import Bits, CodedTensor, Element, element_of
from rollstream.storage.weights.delta.sparse import encode_sparse, segments
from rollstream.storage.weights.delta.streams import StreamWriter
from rollstream.storage.stores.base import Data

SURELY_SPARSE = 4  # below a fourth of the raw bytes the dense coding is not tried


def encode_tensor(base: Data, new: Data, dtype: str) -> CodedTensor:
    """The difference between two tensors of one dtype and length, by safetensors' dtype name."""
    element = element_of(dtype)
    old, now = bits_of(base, element), bits_of(new, element)
    assert len(old) == len(now), "tensors of different lengths have no difference: encode_whole"
    values, changed, payload = encode_sparse(old, now, element)
    if not changed:
        return CodedTensor("same", "", 0, b"")
    if len(payload) * SURELY_SPARSE > now.nbytes:
        whole = encode_whole(new, dtype)
        if len(whole.payload) <= len(payload):
            return whole
    return CodedTensor("sparse", values, changed, payload)


def encode_whole(new: Data, dtype: str) -> CodedTensor:
    """The complete tensor: for one that is new, was reshaped or changed nearly everywhere."""
    element = element_of(dtype)
    bits = bits_of(new, element)
    writer = StreamWriter()
    for part in segments(len(bits)):
        writer.planes(bits[part], element.bytes)
    return CodedTensor("dense", "", len(bits), writer.finish())


def bits_of(data: Data, element: Element) -> Bits:
    """The elements' raw bits, sharing the memory."""
    raw = memoryview(data).cast("B")
    assert raw.nbytes % element.bytes == 0, "not a whole number of elements"
    return np.frombuffer(raw, element.bits) if raw.nbytes else np.zeros(0, element.bits)
