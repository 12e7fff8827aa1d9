"""Encodes ascending positions as the gaps between them, in byte planes.

A gap is the number of unchanged elements before a changed one. It is split into low bytes, as many
as make the rest small, and that rest, the escaped plane: a byte below 255, preceded by a byte 255
for every 255 that it is larger. Gaps between random positions are geometrically distributed, hence
memoryless, so this plane compresses near its entropy at any density; the planes beneath it are
noise.
"""

import numpy as np

from rollstream.storage.weights.delta.coding import Bytes, Indices
from rollstream.storage.weights.delta.streams import StreamReader, StreamWriter, corrupt_delta

ESCAPE = 255
LOW_PLANES_MAX = 2  # with two, the rest of any gap within a segment is below 256
GAP_MEAN_MAX = 256  # of the escaped part


def write_positions(writer: StreamWriter, positions: Indices, elements: int) -> None:
    """Write one or more ascending positions below `elements`."""
    planes = 0
    while elements // len(positions) >> (8 * planes) > GAP_MEAN_MAX:
        planes += 1
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    escaped = _escape(gaps >> (8 * planes))
    writer.number(planes)
    writer.number(len(escaped))
    writer.stream(escaped)
    writer.planes(gaps.view(np.uint64), planes)


def read_positions(reader: StreamReader, count: int, elements: int) -> Indices:
    """Read `count` positions, checked to ascend strictly below `elements` whatever the payload
    holds.
    """
    planes = reader.number(LOW_PLANES_MAX)
    size = reader.number(count + (elements >> (8 * planes)) // ESCAPE)
    gaps = _unescape(reader.stream(size), count)
    if planes:
        if int(gaps.max()) > elements >> (8 * planes):
            raise corrupt_delta("a gap past the end of the tensor")
        low = reader.planes(count, planes, np.dtype("<u8")).view(np.int64)
        gaps = (gaps << (8 * planes)) + low
    gaps += 1
    positions = np.cumsum(gaps)
    positions -= 1
    if positions[-1] >= elements:
        raise corrupt_delta("a position past the end of the tensor")
    return positions


def _escape(gaps: Indices) -> Bytes:
    last = gaps.astype(np.uint8)
    far = np.flatnonzero(gaps >= ESCAPE)
    if not len(far):
        return last
    above, last[far] = np.divmod(gaps[far], ESCAPE)
    return np.insert(last, np.repeat(far, above), ESCAPE)


def _unescape(escaped: Bytes, count: int) -> Indices:
    ends = np.flatnonzero(escaped != ESCAPE)
    if len(ends) != count or not len(escaped) or ends[-1] != len(escaped) - 1:
        raise corrupt_delta("the number of gaps differs from that of positions")
    if len(ends) == len(escaped):
        return escaped.astype(np.int64)
    return np.diff(np.cumsum(escaped, dtype=np.int64)[ends], prepend=0)
