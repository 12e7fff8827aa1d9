"""Cuts large objects: ranges of a read, parts of a multipart write. Pure."""

from dataclasses import dataclass

PARTS_MAX = 10_000  # S3's limit for one upload
PART_BYTES = 16 << 20
FIRST_BYTES = 4 << 20  # an object up to this size costs only one request
RANGE_BYTES = 16 << 20  # hashing included, as fast as boto3's transfers of 8 MiB (measured)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[start, end)`."""

    start: int
    end: int


def split_range(start: int, end: int, bytes_max: int) -> list[ByteRange]:
    """`[start, end)` in order, cut into ranges of `bytes_max`; the last one may be shorter."""
    return [ByteRange(at, min(end, at + bytes_max)) for at in range(start, end, bytes_max)]


def plan_parts(size: int) -> list[ByteRange]:
    """The parts of a multipart write: 16 MiB each, or more if `PARTS_MAX` would be exceeded."""
    least = -(-size // PARTS_MAX)
    return split_range(0, size, max(PART_BYTES, -(-least // MIB) * MIB))
