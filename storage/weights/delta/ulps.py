"""Encodes new elements by their distance from the old ones, counted in representable numbers
(ulps).

A float's sign and magnitude are mapped one to one to an unsigned integer in numeric order (−NaN …
−0, +0 … +NaN), and differences are taken modulo its width, so every bit pattern is restored.
Integers are their own order. An optimiser moves most changed weights by one or two such steps,
where the changed bits themselves look random.
"""

import numpy as np

from rollstream.storage.weights.delta.coding import Bits, Element
from rollstream.storage.weights.delta.streams import StreamReader, StreamWriter


def ulp_differences(old: Bits, new: Bits, element: Element) -> Bits:
    """Steps from old to new, modulo the width."""
    return _ordered(new, element) - _ordered(old, element)


def add_ulps(old: Bits, steps: Bits, element: Element) -> Bits:
    """The elements that many steps from the old ones; inverts `ulp_differences`."""
    return _unordered(_ordered(old, element) + steps, element)


def _ordered(bits: Bits, element: Element) -> Bits:
    """The elements as integers in numeric order. Negative floats get all bits flipped, others only
    the sign; an arithmetic shift makes the mask.
    """
    if not element.is_float:
        return bits
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
    """Write non-zero steps: which go down, which are larger than 1, and by how much those
    exceed 2.
    """
    signed = steps.view(element.signed)
    sizes = np.abs(signed).view(element.bits)  # right for the lowest number too, as unsigned
    far = sizes != 1
    beyond = sizes[np.flatnonzero(far)] - element.bits.type(2)
    writer.flags(signed < 0)
    writer.flags(far)
    if len(beyond):
        planes = (int(beyond.max()).bit_length() + 7) // 8
        writer.number(planes)
        writer.planes(beyond, planes)


def read_steps(reader: StreamReader, count: int, element: Element) -> Bits:
    """Read `count` non-zero steps."""
    down = reader.flags(count).astype(element.bits)
    far = reader.flags(count)
    sizes = np.ones(count, element.bits)
    among = np.flatnonzero(far)
    if len(among):
        planes = reader.number(element.bytes)
        sizes[among] = reader.planes(len(among), planes, element.bits) + element.bits.type(2)
    # Two's complement: −x is x with all bits flipped, plus 1.
    return (sizes ^ -down) + down
