"""Encodes and decodes sparse payloads: segment after segment, the positions (as gaps) and new
values of the changed elements (`docs/explanation/weights.md`, "A payload, byte by byte").
"""

from collections.abc import Iterator

import numpy as np

from rollstream.storage.stores.base import Data
from rollstream.storage.weights.delta.coding import (
    Bits,
    Bytes,
    Changes,
    Element,
    Indices,
    StreamReader,
    StreamWriter,
    ValueCoding,
    corrupt_delta,
)


def ulp_differences(old: Bits, new: Bits, element: Element) -> Bits:
    """Returns distances in representable numbers (ulps, units in the last place), modulo the
    element's width. An optimiser moves most changed weights by one or two, so these compress well.
    """
    return _ordered(new, element) - _ordered(old, element)


def add_ulps(old: Bits, steps: Bits, element: Element) -> Bits:
    return _unordered(_ordered(old, element) + steps, element)


def _ordered(bits: Bits, element: Element) -> Bits:
    if not element.is_float:
        return bits
    # In numeric order (−NaN … −0, +0 … +NaN), one to one: negative floats get all bits flipped,
    # others only the sign. The arithmetic shift makes the mask.
    flips = bits.view(element.signed) >> (8 * element.bytes - 1)
    flips |= np.iinfo(element.signed).min
    return bits ^ flips.view(element.bits)


def _unordered(order: Bits, element: Element) -> Bits:
    if not element.is_float:
        return order
    flips = ~(order.view(element.signed) >> (8 * element.bytes - 1))
    flips |= np.iinfo(element.signed).min
    return order ^ flips.view(element.bits)


def write_steps(writer: StreamWriter, steps: Bits, element: Element) -> None:
    """Writes non-zero steps: flags of the negative ones, flags of sizes above 1, then these sizes,
    less 2.
    """
    signed = steps.view(element.signed)
    # Right for the lowest number too, as unsigned.
    sizes = np.abs(signed).view(element.bits)
    far = sizes != 1
    beyond = sizes[np.flatnonzero(far)] - element.bits.type(2)
    writer.flags(signed < 0)
    writer.flags(far)
    if len(beyond):
        planes = (int(beyond.max()).bit_length() + 7) // 8
        writer.number(planes)
        writer.planes(beyond, planes)


def read_steps(reader: StreamReader, count: int, element: Element) -> Bits:
    down = reader.flags(count).astype(element.bits)
    far = reader.flags(count)
    sizes = np.ones(count, element.bits)
    among = np.flatnonzero(far)
    if len(among):
        planes = reader.number(element.bytes)
        sizes[among] = reader.planes(len(among), planes, element.bits) + element.bits.type(2)
    # Two's complement: −x is x with all bits flipped, plus 1.
    return (sizes ^ -down) + down


ESCAPE = 255  # this byte adds 255 to the number that the next byte continues
LOW_PLANES_MAX = 2  # with two low bytes, the rest of any gap within a segment is below 256
GAP_MEAN_MAX = 256  # largest mean rest of a gap; above it one more low byte is split off


def write_positions(writer: StreamWriter, positions: Indices, elements: int) -> None:
    """Writes ascending positions below `elements`, as numbers of unchanged elements before each. A
    gap is split into as many low bytes as make the rest small (`GAP_MEAN_MAX`), in planes, and the
    rest (`_escape`).
    """
    planes = 0
    while elements // len(positions) >> (8 * planes) > GAP_MEAN_MAX:
        planes += 1
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    # Gaps between random positions are geometrically distributed, hence memoryless: the rests
    # compress near their entropy at any density, and low bytes do not compress.
    escaped = _escape(gaps >> (8 * planes))
    writer.number(planes)
    writer.number(len(escaped))
    writer.stream(escaped)
    writer.planes(gaps.view(np.uint64), planes)


def read_positions(reader: StreamReader, count: int, elements: int) -> Indices:
    """Read `count` positions, strictly ascending below `elements`, or raise `CorruptObject`."""
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
    """Returns each number as a byte below 255, after a byte 255 for every 255 in it."""
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


SEGMENT = 1 << 22  # elements; the last segment of a tensor may be shorter
COMPARED = 1 << 17  # elements compared at a time, so that they stay in cache
TRIED = 1 << 14  # so many changed elements are coded both ways, to choose the smaller coding


def segments(elements: int) -> Iterator[slice]:
    for start in range(0, elements, SEGMENT):
        yield slice(start, min(start + SEGMENT, elements))


def encode_sparse(base: Bits, new: Bits, element: Element) -> tuple[ValueCoding, int, bytes]:
    """Returns the coding of values ("" if nothing differs), the number of changed elements, and the
    payload.
    """
    writer = StreamWriter()
    values: ValueCoding = ""
    total = 0
    for part in segments(len(base)):
        changed, old, now = _compare(base[part], new[part])
        total += len(changed)
        writer.number(len(changed))
        if len(changed):
            values = values or _cheaper(old[:TRIED], now[:TRIED], element)
            write_positions(writer, changed, part.stop - part.start)
            _write_values(writer, old, now, values, element)
    return values, total, writer.finish()


def decode_sparse(payload: Data, base: Bits, values: ValueCoding, element: Element) -> Changes:
    """Returns the changes; `base` is not written. Raises `CorruptObject` if the payload does not
    fit.
    """
    reader = StreamReader(payload)
    # All in memory, so that a caller writes none before the whole payload is known to fit.
    segment_changes: list[Changes] = []
    for part in segments(len(base)):
        changes = read_segment(reader, base[part], values, element)
        if len(changes.indices):
            segment_changes.append(Changes(changes.indices + part.start, changes.values))
    reader.finish()
    if not segment_changes:
        raise corrupt_delta("no changes")
    return Changes(
        np.concatenate([changes.indices for changes in segment_changes]),
        np.concatenate([changes.values for changes in segment_changes]),
    )


def read_segment(
    reader: StreamReader, base: Bits, values: ValueCoding, element: Element
) -> Changes:
    """Returns the changes at positions within the segment; `base` holds its old elements. Raises
    `CorruptObject` if the payload does not fit.
    """
    changed = reader.number(len(base))
    if not changed:
        return Changes(np.zeros(0, np.int64), np.zeros(0, element.bits))
    where = read_positions(reader, changed, len(base))
    return Changes(where, _read_values(reader, base.take(where), values, element))


def _compare(base: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
    differs = np.empty(COMPARED, np.bool_)
    differences: list[tuple[Indices, Bits, Bits]] = []
    for start in range(0, len(base), COMPARED):
        old, now = base[start : start + COMPARED], new[start : start + COMPARED]
        # Each piece is read from memory once.
        where = np.flatnonzero(np.not_equal(old, now, out=differs[: len(old)]))
        differences.append((where + start, old.take(where), now.take(where)))
    where, old, now = zip(*differences, strict=True)
    return np.concatenate(where), np.concatenate(old), np.concatenate(now)


def _cheaper(old: Bits, new: Bits, element: Element) -> ValueCoding:
    sizes: dict[ValueCoding, int] = {}
    choices: tuple[ValueCoding, ...] = ("ulp", "absolute")
    for values in choices:
        writer = StreamWriter()
        _write_values(writer, old, new, values, element)
        sizes[values] = len(writer.finish())
    return min(choices, key=lambda choice: sizes[choice])


def _write_values(
    writer: StreamWriter, old: Bits, new: Bits, values: ValueCoding, element: Element
) -> None:
    if values == "ulp":
        write_steps(writer, ulp_differences(old, new, element), element)
    else:
        writer.planes(new, element.bytes)


def _read_values(reader: StreamReader, old: Bits, values: ValueCoding, element: Element) -> Bits:
    if values == "ulp":
        return add_ulps(old, read_steps(reader, len(old), element), element)
    return reader.planes(len(old), element.bytes, element.bits)
