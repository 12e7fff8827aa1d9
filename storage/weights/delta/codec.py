"""Applies an encoded difference in place.

Nothing is written before the complete payload was read and found to fit: after `CorruptObject` the
tensor is unchanged. Only the tensor's hash, which the caller checks, proves that the result is
right: a payload that fits may have been applied to another base than its parent.
"""

import numpy as np
import numpy.typing as npt

from rollstream.storage.weights.delta.coding import Bits, Changes, Coding, Element, ValueCoding, element_of
from rollstream.storage.weights.delta.encode import bits_of
from rollstream.storage.weights.delta.sparse import decode_sparse, segments
from rollstream.storage.weights.delta.streams import StreamReader, corrupt_delta
from rollstream.storage.stores.base import Data
from rollstream.errors import CorruptObject

Target = bytearray | memoryview | npt.NDArray[np.uint8]  # contiguous and writable


def apply_tensor(
    coding: Coding, values: ValueCoding, payload: Data, into: Target, dtype: str
) -> Changes | None:
    """Turn the parent's bytes into the new ones. Extra memory grows with the number of changes.

    Returns the replaced elements, or None if more than half were replaced: then all of them count.
    """
    element = element_of(dtype)
    target = bits_of(into.data if isinstance(into, np.ndarray) else into, element)
    assert target.flags.writeable or not len(target), "the tensor is read-only"
    known = ("ulp", "absolute") if coding == "sparse" else ("",)
    if coding not in ("same", "sparse", "dense") or values not in known:
        raise CorruptObject(f"a delta names coding {coding!r} with values {values!r}, unknown here")
    if coding == "dense":
        target[:] = _read_whole(payload, len(target), element)
        return None
    if coding == "same":
        if len(payload):
            raise corrupt_delta("a payload where nothing changed")
        return Changes(np.zeros(0, np.int64), np.zeros(0, element.bits))
    changes = decode_sparse(payload, target, values, element)
    target[changes.indices] = changes.values
    return changes if 2 * len(changes.indices) <= len(target) else None


def _read_whole(payload: Data, elements: int, element: Element) -> Bits:
    reader = StreamReader(payload)
    bits = np.empty(elements, element.bits)
    for part in segments(elements):
        size = part.stop - part.start
        bits[part] = reader.planes(size, element.bytes, element.bits)
    reader.finish()
    return bits
