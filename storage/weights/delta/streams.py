"""The byte level of the codec: numbers of variable length, and byte streams that zstd compresses
where that helps.

A stream does not carry its full length: readers derive it from earlier fields and check it before
they allocate memory, so a damaged payload costs no more memory than a valid one.
"""

import numpy as np
import zstandard

from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import Data
from rollstream.storage.weights.delta.coding import Bits, Bytes, Flags

NUMBER_BYTES_MAX = 10  # 64 bits, seven a byte

# Streams are nearly memoryless, so only Huffman coding and long runs of one byte save space.
# Searching for matches costs time, and short matches cost size too.
PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
)


def corrupt_delta(what: str) -> CorruptObject:
    """The error for a payload that no encoder wrote, or that was made against other weights."""
    return CorruptObject(
        f"{what} in a delta: its payload is damaged or its base is not the parent; nothing was "
        "written, fetch it again or the anchor"
    )


class StreamWriter:
    """A payload being written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)

    def number(self, value: int) -> None:
        """Write LEB128: seven bits a byte, the lowest first; a set top bit means that more
        follow.
        """
        assert value >= 0
        out = bytearray()
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self._parts.append(bytes(out))

    def stream(self, data: Bytes) -> None:
        """Write a number (stored length × 2, + 1 if it is a zstd frame) and the stored bytes."""
        raw = np.ascontiguousarray(data).data
        packed = self._compressor.compress(raw) if raw.nbytes else b""
        if len(packed) < raw.nbytes:
            self.number(len(packed) * 2 + 1)
            self._parts.append(packed)
        else:
            self.number(raw.nbytes * 2)
            self._parts.append(bytes(raw))

    def flags(self, flags: Flags) -> None:
        """Write flags, eight to a byte, the first in the lowest bit."""
        self.stream(np.packbits(flags, bitorder="little"))

    def planes(self, numbers: Bits, count: int) -> None:
        """Write the lowest `count` bytes of each number, all lowest bytes first."""
        columns = numbers.view(np.uint8).reshape(len(numbers), -1)
        for plane in range(count):
            self.stream(columns[:, plane])

    def finish(self) -> bytes:
        return b"".join(self._parts)


class StreamReader:
    """A payload being read; every method raises `CorruptObject` rather than read past its end."""

    def __init__(self, payload: Data) -> None:
        self._data = memoryview(payload).cast("B")
        self._at = 0
        self._decompressor = zstandard.ZstdDecompressor()

    def number(self, most: int) -> int:
        """Read a number of at most `most`."""
        value = 0
        for index in range(NUMBER_BYTES_MAX):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if value > most:
                    raise corrupt_delta(f"{value:,} where at most {most:,} can be")
                return value
        raise corrupt_delta("a number without end")

    def stream(self, size: int) -> Bytes:
        """Read a stream of exactly `size` bytes."""
        stored, packed = divmod(self.number(2 * size + 1), 2)
        data = self._take(stored)
        if not packed:
            if stored != size:
                raise corrupt_delta(f"a stream of {stored:,} bytes where {size:,} must be")
            return np.frombuffer(data, np.uint8)
        try:
            if zstandard.frame_content_size(data) != size:
                raise corrupt_delta(f"a zstd frame of another size than {size:,} bytes")
            whole = self._decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise corrupt_delta(f"a zstd frame that does not open ({error})") from error
        if len(whole) != size:
            raise corrupt_delta(f"a zstd frame of {len(whole):,} bytes where {size:,} must be")
        return np.frombuffer(whole, np.uint8)

    def flags(self, count: int) -> Flags:
        packed = self.stream((count + 7) // 8)
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def planes(self, length: int, count: int, bits: np.dtype[np.unsignedinteger]) -> Bits:
        """Read `length` numbers of `count` bytes each, as wide as `bits`."""
        columns = np.zeros((length, bits.itemsize), np.uint8)
        for plane in range(count):
            columns[:, plane] = self.stream(length)
        return columns.view(bits).reshape(length)

    def finish(self) -> None:
        if self._at != len(self._data):
            raise corrupt_delta(f"{len(self._data) - self._at:,} bytes too many")

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self._data):
            raise corrupt_delta(f"{end - len(self._data):,} bytes too few")
        taken = self._data[self._at : end]
        self._at = end
        return taken
