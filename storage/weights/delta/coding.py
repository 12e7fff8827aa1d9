"""A tensor's difference from its base. Elements are compared as bits: −0 and +0 differ, and so do
NaNs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import zstandard

from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import Data

Coding = Literal["same", "sparse", "dense"]
"""`same`: no payload, the tensor equals its base. `sparse`: the changed elements, which need the
base. `dense`: all new elements, which need none.
"""
ValueCoding = Literal["ulp", "absolute", ""]
"""`ulp`: distances from the old values in representable numbers; `absolute`: the new bits; ""
without changed elements or if not sparse.
"""
Bits = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Element:
    """A dtype as integers, unsigned (`bits`) and `signed`. `is_float`: the top bit is the sign, and
    the other bits grow with the magnitude.
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
    """Returns the element of a dtype (safetensors' name); raises `CorruptObject` for an unknown
    one.
    """
    if dtype not in ELEMENTS:
        dtypes = ", ".join(ELEMENTS)
        raise CorruptObject(f"a delta names dtype {dtype!r}, unknown here (known: {dtypes})")
    return ELEMENTS[dtype]


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """Holds a tensor's stored difference. `changed` counts changed elements, for `dense` all."""

    coding: Coding
    values: ValueCoding
    changed: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """Ascending positions in the flat tensor, and the new bits."""

    indices: Indices
    values: Bits


def squash(changes: Sequence[Changes]) -> Changes:
    """Merges changes of consecutive versions, oldest first; an element's last change counts."""
    assert changes, "nothing to squash"
    indices = np.concatenate([each.indices for each in reversed(changes)])
    values = np.concatenate([each.values for each in reversed(changes)])
    # `unique` finds the first of equal positions, and the newest version comes first here.
    positions, first = np.unique(indices, return_index=True)
    return Changes(positions, values[first])


NUMBER_BYTES_MAX = 10  # a number has at most 64 bits, seven in each byte

# A byte of a stream hardly depends on the bytes before it. So Huffman coding and long runs of one
# byte save space; a search for repeated sequences costs time, and short ones make the data larger.
PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
)


def corrupt_delta(what: str) -> CorruptObject:
    return CorruptObject(
        f"{what} in a delta: its payload is damaged or its base is not the parent; nothing was "
        "written, fetch it again or the anchor"
    )


class StreamWriter:
    """Numbers of variable length and streams: runs of bytes, compressed by zstd if that is smaller,
    whose uncompressed lengths `StreamReader` must know.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)

    def number(self, value: int) -> None:
        """Write LEB128: seven bits in each byte, the lowest first."""
        assert value >= 0
        out = bytearray()
        while value >= 0x80:
            # The top bit marks that another byte follows.
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self._parts.append(bytes(out))

    def stream(self, data: Bytes) -> None:
        """Writes the stored length × 2, plus 1 if it is a zstd frame, and the stored bytes."""
        raw = np.ascontiguousarray(data).data
        packed = self._compressor.compress(raw) if raw.nbytes else b""
        if len(packed) < raw.nbytes:
            self.number(len(packed) * 2 + 1)
            self._parts.append(packed)
        else:
            self.number(raw.nbytes * 2)
            self._parts.append(bytes(raw))

    def flags(self, flags: Flags) -> None:
        """Write eight flags in each byte of a stream, the first in the lowest bit."""
        self.stream(np.packbits(flags, bitorder="little"))

    def planes(self, numbers: Bits, count: int) -> None:
        """Writes the lowest `count` bytes of each number, one stream each, the lowest byte
        first.
        """
        # High bytes are often equal, so a plane of them compresses well.
        columns = numbers.view(np.uint8).reshape(len(numbers), -1)
        for plane in range(count):
            self.stream(columns[:, plane])

    def finish(self) -> bytes:
        return b"".join(self._parts)


class StreamReader:
    """Every method raises `CorruptObject` if the payload does not fit it."""

    def __init__(self, payload: Data) -> None:
        self._data = memoryview(payload).cast("B")
        self._at = 0
        self._decompressor = zstandard.ZstdDecompressor()

    def number(self, number_max: int) -> int:
        value = 0
        for index in range(NUMBER_BYTES_MAX):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if value > number_max:
                    raise corrupt_delta(f"{value:,} where at most {number_max:,} can be")
                return value
        raise corrupt_delta("a number without end")

    def stream(self, size: int) -> Bytes:
        stored, packed = divmod(self.number(2 * size + 1), 2)
        data = self._take(stored)
        if not packed:
            if stored != size:
                raise corrupt_delta(f"a stream of {stored:,} bytes where {size:,} must be")
            return np.frombuffer(data, np.uint8)
        try:
            # Compared before memory is allocated: a damaged payload costs no more memory than a
            # valid one.
            if zstandard.frame_content_size(data) != size:
                raise corrupt_delta(f"a zstd frame of another size than {size:,} bytes")
            raw = self._decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise corrupt_delta(f"a zstd frame that does not open ({error})") from error
        if len(raw) != size:
            raise corrupt_delta(f"a zstd frame of {len(raw):,} bytes where {size:,} must be")
        return np.frombuffer(raw, np.uint8)

    def flags(self, count: int) -> Flags:
        packed = self.stream((count + 7) // 8)
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def planes(self, length: int, count: int, bits: np.dtype[np.unsignedinteger]) -> Bits:
        """Reads `length` numbers, of which the lowest `count` bytes were written; the others are
        0.
        """
        columns = np.zeros((length, bits.itemsize), np.uint8)
        for plane in range(count):
            columns[:, plane] = self.stream(length)
        return columns.view(bits).reshape(length)

    def finish(self) -> None:
        """Raise `CorruptObject` if bytes remain after the last field."""
        if self._at != len(self._data):
            raise corrupt_delta(f"{len(self._data) - self._at:,} bytes too many")

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self._data):
            raise corrupt_delta(f"{end - len(self._data):,} bytes too few")
        taken = self._data[self._at : end]
        self._at = end
        return taken
