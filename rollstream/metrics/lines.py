"""Reads the complete lines of a metrics file from a stored position; an incomplete last line waits.

A `FilePosition` holds the next byte offset and the hash of the line before it. So a file that was replaced
by another run's is detected instead of being forwarded from its middle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rollstream.errors import CorruptObject

READ_BYTES_MAX = 1 << 20  # per read of a file; lines are far shorter


class FilePosition(msgspec.Struct, frozen=True):
    """Everything before `offset` was forwarded: `line` lines, the last one of `before` bytes."""

    offset: int = 0
    line: int = 0
    before: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """One line with its number from 1; `values` is None if it is not a JSON object."""

    number: int
    values: dict[str, Any] | None
    after: FilePosition


def read_lines(path: Path, place: FilePosition) -> Iterator[MetricsLine]:
    """Yields the complete lines after `place`, up to `READ_BYTES_MAX` bytes; none without a file.

    Raises `CorruptObject` if the file is not the one in which the position was recorded.
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
        after = FilePosition(place.offset + len(raw), place.line + 1, len(raw), _hash(raw))
        yield MetricsLine(after.line, _parsed(raw), after)
        place = after


def _replaced(path: Path) -> CorruptObject:
    return CorruptObject(
        f"{path} is not the file that was forwarded before: the folder holds another run"
    )


def _hash(raw: bytes) -> str:
    return xxhash.xxh3_64(raw).hexdigest()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
