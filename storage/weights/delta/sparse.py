"""Sparse payloads: segment after segment of 4 194 304 elements (the last may be shorter), each with
the positions and new values of changed elements. Segments are independent, so encoding needs memory
for one. Decoding needs memory for all changes, because nothing is written before everything fits.

    number n            changed elements; nothing follows a 0
    number p            low bytes of every gap, 0 to 2
    number s            bytes of the escaped plane
    stream of s         gaps ≫ 8p: a byte below 255, after a byte 255 for every 255 more
    p streams of n      the gaps' low bytes, the lowest first
    values ulp:
      stream of ⌈n/8⌉   steps down, a bit each, the first in the lowest
      stream of ⌈n/8⌉   steps of more than 1, likewise; m of them
      number w          bytes of each size; present only if m > 0, as are the following
      w streams of m    sizes − 2, the lowest bytes first
    values absolute:
      streams of n      the new elements' bytes, as many streams as an element has bytes

A number is LEB128: seven bits a byte, the lowest first; a set top bit means that more follow. A
stream is a number, stored bytes × 2 + (1 if they are a zstd frame that carries its content's size),
and those bytes; its full length follows from earlier fields. A dense payload is, per segment, as
many streams of all its elements' bytes. Elements are little-endian.
"""

from collections.abc import Iterator

import numpy as np

from rollstream.storage.weights.delta.coding import Bits, Changes, Element, Indices, ValueCoding
from rollstream.storage.weights.delta.gaps import read_positions, write_positions
from rollstream.storage.weights.delta.streams import StreamReader, StreamWriter, corrupt_delta
from rollstream.storage.weights.delta.ulps import ulp_differences, add_ulps, read_steps, write_steps
from rollstream.storage.stores.base import Data

SEGMENT = 1 << 22  # elements
COMPARED = 1 << 17  # elements compared at a time, so that they stay in cache
TRIED = 1 << 14  # changed elements whose size decides between steps and absolute values


def segments(elements: int) -> Iterator[slice]:
    for start in range(0, elements, SEGMENT):
        yield slice(start, min(start + SEGMENT, elements))


def encode_sparse(base: Bits, new: Bits, element: Element) -> tuple[ValueCoding, int, bytes]:
    """How values are coded, the number of changed elements, and the payload."""
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
    """The changes that the payload makes to these elements; nothing is written. Raises
    `CorruptObject` if it does not fit them.
    """
    reader = StreamReader(payload)
    indices: list[Indices] = []
    bits: list[Bits] = []
    for part in segments(len(base)):
        changed = reader.number(part.stop - part.start)
        if changed:
            where = read_positions(reader, changed, part.stop - part.start)
            bits.append(_read_values(reader, base[part].take(where), values, element))
            indices.append(where + part.start)
    reader.finish()
    if not indices:
        raise corrupt_delta("no changes")
    return Changes(np.concatenate(indices), np.concatenate(bits))


def _compare(base: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
    """Positions that differ, with their old and new bits. Each piece is read from memory once."""
    differs = np.empty(COMPARED, np.bool_)
    found: list[tuple[Indices, Bits, Bits]] = []
    for start in range(0, len(base), COMPARED):
        old, now = base[start : start + COMPARED], new[start : start + COMPARED]
        where = np.flatnonzero(np.not_equal(old, now, out=differs[: len(old)]))
        found.append((where + start, old.take(where), now.take(where)))
    where, old, now = zip(*found, strict=True)
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
