"""How large objects are cut: ranges of a read, parts of a multipart write. Pure."""

from dataclasses import dataclass

PARTS_MAX = 10_000  # of S3, in one upload
PART_BYTES = 16 << 20
FIRST_BYTES = 4 << 20  # one request is all that an object up to this size costs
RANGE_BYTES = 16 << 20  # as fast as one of boto3 with 8 MiB and the hash on top (measured)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `[start, end)`."""

    start: int
    end: int


def split(start: int, end: int, bytes_max: int) -> list[Range]:
    """`[start, end)` in order, cut into ranges of `bytes_max`, the last one shorter."""
    return [Range(at, min(end, at + bytes_max)) for at in range(start, end, bytes_max)]


def plan_parts(size: int) -> list[Range]:
    """The parts of a multipart write: 16 MiB, or more where `PARTS_MAX` would be exceeded."""
    least = -(-size // PARTS_MAX)
    return split(0, size, max(PART_BYTES, -(-least // MIB) * MIB))
