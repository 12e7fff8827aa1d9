"""Whole lines of a metrics file from a stored place on; a half-written last line waits.

A `Place` names the byte where to go on and the hash of the line before it, so a file that was
replaced by another one's is noticed instead of forwarded from its middle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from streams.errors import CorruptObject

READ_BYTES_MAX = 1 << 20  # of a file, per look; no line is nearly as long


class Place(msgspec.Struct, frozen=True):
    """Everything before `offset` was forwarded: `line` lines, the last with this hash."""

    offset: int = 0
    line: int = 0
    before: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line with its number (from 1); `values` is None for one that is no JSON object."""

    number: int
    values: dict[str, Any] | None
    after: Place


def lines_from(path: Path, place: Place) -> Iterator[Line]:
    """The whole lines after `place`, at most `READ_BYTES_MAX` of them; none if there is no file.

    `CorruptObject` when the file is not the one that the place was noted in.
    """
    try:
        with path.open("rb") as file:
            file.seek(place.offset - place.before)
            if place.offset and _hash(file.read(place.before)) != place.hash:
                raise _replaced(path)
            data = file.read(READ_BYTES_MAX)
    except FileNotFoundError:
        if place.offset:
            raise _replaced(path) from None
        return
    *whole, rest = data.split(b"\n")
    if len(rest) == READ_BYTES_MAX:
        raise CorruptObject(f"{path} has a line of more than {READ_BYTES_MAX} bytes; it is damaged")
    for raw in (line + b"\n" for line in whole):
        after = Place(place.offset + len(raw), place.line + 1, len(raw), _hash(raw))
        yield Line(after.line, _parsed(raw), after)
        place = after


def _replaced(path: Path) -> CorruptObject:
    return CorruptObject(
        f"{path} is not the file that was forwarded before: another run lies in this folder"
    )


def _hash(raw: bytes) -> str:
    return xxhash.xxh3_64(raw).hexdigest()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
