"""The types of an encoded difference between one tensor's bytes and its parent's.

`same` has no payload. `sparse` holds the changed elements and needs the parent's bytes. `dense`
holds all new bytes and needs no base. Elements are compared as bits, never as values: −0 and +0
differ, and so do two NaNs with different payloads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollstream.errors import CorruptObject

Coding = Literal["same", "sparse", "dense"]
ValueCoding = Literal["ulp", "absolute", ""]
Bits = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a dtype as raw bits, unsigned and signed. `is_float` if the top bit is a sign
    and the others a magnitude.
    """

    bits: np.dtype[np.unsignedinteger]
    signed: np.dtype[np.signedinteger]
    is_float: bool

    @property
    def bytes(self) -> int:
        return self.bits.itemsize


def _elements(is_float: bool, widths: dict[str, int]) -> dict[str, Element]:
    return {
        name: Element(np.dtype(f"<u{width}"), np.dtype(f"<i{width}"), is_float)
        for name, width in widths.items()
    }


ELEMENTS = {
    **_elements(False, {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}),
    **_elements(True, {"F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}),
}


def element_of(dtype: str) -> Element:
    """The element type for safetensors' dtype name; raises `CorruptObject` for an unknown one."""
    if dtype not in ELEMENTS:
        known = ", ".join(ELEMENTS)
        raise CorruptObject(f"a delta names dtype {dtype!r}, unknown here (known: {known})")
    return ELEMENTS[dtype]


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """One tensor's difference from its parent's tensor. `changed` counts elements (all of them for
    `dense`); `values` is how a sparse difference encodes its elements.
    """

    coding: Coding
    values: ValueCoding
    changed: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """Replaced elements: flat ascending positions and their new raw bits."""

    indices: Indices
    values: Bits


def squash(changes: Sequence[Changes]) -> Changes:
    """Changes of consecutive versions of one tensor, oldest first, merged into one; later values
    win.
    """
    assert changes, "nothing to squash"
    indices = np.concatenate([each.indices for each in reversed(changes)])
    values = np.concatenate([each.values for each in reversed(changes)])
    kept, first = np.unique(indices, return_index=True)
    return Changes(kept, values[first])
