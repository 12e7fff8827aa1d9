"""Encodes a tensor as its difference from its parent's, exact for every bit pattern of every dtype.
A wrong base may remain undetected; only the tensor's hash, which the caller checks, proves the
result.
"""

import numpy as np
import numpy.typing as npt

from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import Data
from rollstream.storage.weights.delta.coding import (
    Bits,
    Changes,
    CodedTensor,
    Coding,
    Element,
    Indices,
    StreamReader,
    StreamWriter,
    ValueCoding,
    corrupt_delta,
    element_of,
)
from rollstream.storage.weights.delta.sparse import (
    decode_sparse,
    encode_sparse,
    read_segment,
    segments,
)

SURELY_SPARSE = 4  # a sparse payload up to a fourth of the raw bytes is kept; dense is not tried


def encode_tensor(base: Data, new: Data, dtype: str) -> CodedTensor:
    """Returns the difference between two tensors of one length and dtype (safetensors' name). Dense
    is tried only if the sparse payload is large.
    """
    element = element_of(dtype)
    old_bits, new_bits = bits_of(base, element), bits_of(new, element)
    assert len(old_bits) == len(new_bits), (
        "tensors of different lengths have no difference: encode_whole"
    )
    values, changed, payload = encode_sparse(old_bits, new_bits, element)
    if not changed:
        return CodedTensor("same", "", 0, b"")
    if len(payload) * SURELY_SPARSE > new_bits.nbytes:
        dense = encode_whole(new, dtype)
        if len(dense.payload) <= len(payload):
            return dense
    return CodedTensor("sparse", values, changed, payload)


def encode_whole(new: Data, dtype: str) -> CodedTensor:
    element = element_of(dtype)
    bits = bits_of(new, element)
    writer = StreamWriter()
    for part in segments(len(bits)):
        writer.planes(bits[part], element.bytes)
    return CodedTensor("dense", "", len(bits), writer.finish())


def bits_of(data: Data, element: Element) -> Bits:
    """Returns the elements' bits as integers that share the memory of `data`."""
    raw = memoryview(data).cast("B")
    assert raw.nbytes % element.bytes == 0, "not a whole number of elements"
    return np.frombuffer(raw, element.bits) if raw.nbytes else np.zeros(0, element.bits)


Target = bytearray | memoryview | npt.NDArray[np.uint8]  # contiguous and writable


def apply_tensor(
    coding: Coding, values: ValueCoding, payload: Data, into: Target, dtype: str
) -> Changes | None:
    """Turns the parent's bytes in `into` into the new ones; after `CorruptObject` the tensor is
    unchanged. Returns the replaced elements, None if these are more than half, and all count as
    replaced.
    """
    element = element_of(dtype)
    target = bits_of(into.data if isinstance(into, np.ndarray) else into, element)
    assert target.flags.writeable or not len(target), "the tensor is read-only"
    _check_coding(coding, values)
    if coding == "dense":
        target[:] = _read_whole(payload, len(target), element)
        return None
    if coding == "same":
        if len(payload):
            raise corrupt_delta("a payload where nothing changed")
        return Changes(np.zeros(0, np.int64), np.zeros(0, element.bits))
    # The complete payload is checked before anything is written.
    changes = decode_sparse(payload, target, values, element)
    target[changes.indices] = changes.values
    return changes if 2 * len(changes.indices) <= len(target) else None


def _check_coding(coding: Coding, values: ValueCoding) -> None:
    value_codings = ("ulp", "absolute") if coding == "sparse" else ("",)
    if coding not in ("same", "sparse", "dense") or values not in value_codings:
        raise CorruptObject(f"a delta names coding {coding!r} with values {values!r}, unknown here")


class SegmentDecoder:
    """A sparse or dense payload by consecutive `segments`, then `finish`, with memory for one.
    Every call raises `CorruptObject` if the payload does not fit; the tensor is then a mixture of
    old and new segments.
    """

    def __init__(
        self, coding: Coding, values: ValueCoding, payload: Data, element: Element
    ) -> None:
        _check_coding(coding, values)
        self._values: ValueCoding = values
        self._coding, self._element = coding, element
        self._reader = StreamReader(payload)

    def apply(self, segment: Bits) -> Indices | None:
        """Changes the segment in place; returns the replaced positions in it, None if all were
        replaced.
        """
        if self._coding == "dense":
            segment[:] = self._reader.planes(len(segment), self._element.bytes, self._element.bits)
            return None
        changes = read_segment(self._reader, segment, self._values, self._element)
        segment[changes.indices] = changes.values
        return changes.indices

    def finish(self) -> None:
        """Raise `CorruptObject` if the payload does not end here."""
        self._reader.finish()


def _read_whole(payload: Data, elements: int, element: Element) -> Bits:
    reader = StreamReader(payload)
    bits = np.empty(elements, element.bits)
    for part in segments(elements):
        size = part.stop - part.start
        bits[part] = reader.planes(size, element.bytes, element.bits)
    reader.finish()
    return bits
