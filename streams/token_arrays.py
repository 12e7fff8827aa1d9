"""Named arrays with rows for tokens of a trajectory.

An array covers the tokens for which an engine wrote it, no others. After a resume on an engine that
does not write it, the later tokens have none: that engine did nothing that the array would
describe.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollstream.errors import DecodeError
from rollstream.streams.records import GENERATED, Partial, Trajectory
from rollstream.streams.release import ALLOWED_TOKENS, missing_features
from rollstream.streams.values import ArrayHead, Sources, TokenRange, Tokens

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", "uint8", "uint16", "int32", "int64", "float16", "float32")
}
"""On the wire little-endian; a further type needs a word in `needs`."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
ARRAYS_MAX, DIMENSIONS_MAX = 16, 4
ROW_BYTES_MAX = 1 << 16
"""Most bytes of one row: a bit for each of 524 288 tokens."""
DECODED_BYTES_MAX = 1 << 30
"""Most bytes of a record's rows in memory: bits of 150 000 tokens at 57 000 positions."""
WINDOW_BYTES_MAX = 8 << 20  # memory of the decoder beside its output; zstd's levels to 19 fit
LEVEL = 1
_SHOWN_MAX = 200  # characters of a reason: a number of a record may have thousands of digits

ALLOWED = "allowed"
"""As bits, uint8 [vocabulary / 8], the lowest bit first; tokens beyond the row's end were not
allowed. Log-probabilities are of the distribution over the allowed tokens, so a trainer must leave
out the others too.
"""
NEEDED_ARRAYS: Mapping[str, str] = {ALLOWED: ALLOWED_TOKENS}
"""Arrays that change what the log-probabilities mean → the word in a record's `needs`: a reader
that ignored the array would train wrongly.
"""


class ArrayPiece(NamedTuple):
    """Rows of one array, as a record has them: `data` are the `head.bytes` compressed bytes."""

    head: ArrayHead
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class TokenArray:
    """`values` [rows, *shape], and the indices `tokens` [rows] among all tokens, ascending."""

    values: NDArray[Any]
    tokens: NDArray[np.int64]

    def at(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Returns the rows of `indices` [n], zeros where there is none, and whether [n] there is
        one.
        """
        places = np.searchsorted(self.tokens, indices).clip(max=len(self.tokens) - 1)
        is_covered = self.tokens[places] == indices
        rows = self.values[places]
        rows[~is_covered] = 0
        return rows, is_covered


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """Decoded when they are asked for; `NO_ARRAYS` cost nothing."""

    pieces: tuple[ArrayPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def get(
        self, name: str, dtype: str | None = None, shape: tuple[int, ...] | None = None
    ) -> TokenArray | None:
        """Returns None if the record has none, or not of this `dtype` and row `shape`. Raises
        `DecodeError` for damaged bytes, which `arrays_problem` finds beforehand.
        """
        for head, data in self.pieces:
            is_other = dtype not in (None, head.dtype) or shape not in (None, head.shape)
            if head.name == name and not is_other:
                return TokenArray(_decompressed(head, data), token_indices(head.ranges))
        return None


NO_ARRAYS = TokenArrays()


def arrays_of(record: Partial | Trajectory) -> TokenArrays:
    """Returns the arrays of a record whose heads fit (`heads_problem`)."""
    if record.array_bytes is None:
        return NO_ARRAYS
    data, at, pieces = record.array_bytes.data, 0, list[ArrayPiece]()
    for head in record.arrays:
        pieces.append(ArrayPiece(head, data[at : at + head.bytes]))
        at += head.bytes
    return TokenArrays(tuple(pieces))


def array_fields(pieces: Iterable[ArrayPiece]) -> dict[str, Any]:
    """Returns {} for none. Pieces of one name, type and shape become one array."""
    joined: dict[tuple[str, str, tuple[int, ...]], list[ArrayPiece]] = {}
    for piece in pieces:
        joined.setdefault((piece.head.name, piece.head.dtype, piece.head.shape), []).append(piece)
    if not joined:
        return {}
    heads: list[ArrayHead] = []
    for (name, dtype, shape), parts in joined.items():
        ranges = _merged(part for head, _ in parts for part in head.ranges)
        heads.append(ArrayHead(name, dtype, shape, ranges, sum(head.bytes for head, _ in parts)))
    # Frames of zstd one behind the other are one stream: nothing is compressed again.
    data = b"".join(part.data for parts in joined.values() for part in parts)
    words = {NEEDED_ARRAYS[name] for name, _, _ in joined if name in NEEDED_ARRAYS}
    return {
        "arrays": tuple(heads),
        "array_bytes": np.frombuffer(data, np.uint8),
        "needs": tuple(sorted(words)),
    }


def make_piece(name: str, values: NDArray[Any], start: int) -> ArrayPiece:
    """Returns rows [n, *shape], n above 0, of the tokens from index `start` on; the dtype is one of
    `DTYPES`.
    """
    dtype = DTYPES[values.dtype.name]
    data = zstandard.ZstdCompressor(LEVEL).compress(np.ascontiguousarray(values, dtype).tobytes())
    ranges = (TokenRange(start, start + len(values)),)
    head = ArrayHead(name, values.dtype.name, values.shape[1:], ranges, len(data))
    return ArrayPiece(head, data)


@dataclass(slots=True)
class GrowingArrays:
    """The first `flushed` pieces are in partials; `ends` has the end of the newest row of each
    array.
    """

    pieces: list[ArrayPiece] = field(default_factory=list[ArrayPiece])
    flushed: int = 0
    ends: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def resumed(cls, pieces: Iterable[ArrayPiece]) -> "GrowingArrays":
        chain = list(pieces)
        ends = {piece.head.name: piece.head.ranges[-1].end for piece in chain}
        return cls(chain, len(chain), ends)

    def add(self, arrays: Mapping[str, NDArray[Any]], end: int, first: int) -> None:
        """Appends rows that end before index `end`. Those of tokens before `first`, and up to the
        array's newest row, are left out.
        """
        for name, rows in arrays.items():
            start = max(end - len(rows), first, self.ends.get(name, 0))
            if start < end:
                self.ends[name] = end
                self.pieces.append(make_piece(name, rows[len(rows) - (end - start) :], start))

    def flush(self, end: int) -> Sequence[ArrayPiece]:
        """Returns the rows that are in no partial yet, of tokens before index `end`; they count as
        flushed.
        """
        waiting, due, later = self.pieces[self.flushed :], list[ArrayPiece](), list[ArrayPiece]()
        for piece in waiting:
            before, behind = _split(piece, end)
            due += before
            later += behind
        self.pieces[self.flushed :] = [*due, *later]
        self.flushed += len(due)
        return due


def _split(piece: ArrayPiece, end: int) -> tuple[list[ArrayPiece], list[ArrayPiece]]:
    (part,) = piece.head.ranges  # of one emission
    if part.end <= end:
        return [piece], []
    if part.start >= end:
        return [], [piece]
    rows, name = _decompressed(*piece), piece.head.name
    count = end - part.start
    return [make_piece(name, rows[:count], part.start)], [make_piece(name, rows[count:], end)]


# ---- what other programs wrote -------------------------------------------------------------------


def heads_problem(record: Partial | Trajectory, length: int) -> str:
    """Returns "" for heads that fit a trajectory whose tokens end at index `length`. Nothing is
    decompressed.
    """
    if record.needs and (missing := missing_features(record.needs)):
        return f"it needs {', '.join(missing)}, which this release lacks"[:_SHOWN_MAX]
    if not record.arrays:
        return "" if record.array_bytes is None else "it has bytes of arrays, but no array"
    if record.array_bytes is None or len(record.arrays) > ARRAYS_MAX:
        return f"{len(record.arrays)} arrays; at most {ARRAYS_MAX}, with their bytes"
    names = [head.name for head in record.arrays]
    if len(set(names)) < len(names):
        return "it has one array twice, perhaps of two types"
    for head in record.arrays:
        if problem := _head_problem(head, length):
            return f"array {head.name!r}: {problem}"[:_SHOWN_MAX]
        if NEEDED_ARRAYS.get(head.name, "") not in ("", *record.needs):
            return f"array {head.name!r}, but `needs` lacks {NEEDED_ARRAYS[head.name]}"
    if sum(map(_row_bytes_in_all, record.arrays)) > DECODED_BYTES_MAX:
        return f"arrays of more than {DECODED_BYTES_MAX:,} bytes"
    if sum(head.bytes for head in record.arrays) != len(record.array_bytes):
        return "its arrays have other bytes than it states"
    return ""


def _head_problem(head: ArrayHead, length: int) -> str:
    if NAME.fullmatch(head.name) is None:
        return "its name is none"
    if head.dtype not in DTYPES:
        return f"items of type {head.dtype!r}"
    is_shape = len(head.shape) <= DIMENSIONS_MAX and all(
        1 <= size <= ROW_BYTES_MAX for size in head.shape
    )
    if not is_shape or _row_bytes(head) > ROW_BYTES_MAX:
        return f"rows of shape {head.shape}, above {ROW_BYTES_MAX:,} bytes"
    if head.bytes < 1 or not head.ranges:
        return "it is empty"
    before = 0
    for part in head.ranges:
        if not before <= part.start < part.end <= length:
            return f"rows of tokens [{part.start}, {part.end}) after {before}, of {length}"
        before = part.end
    return ""


def trainable_arrays(record: Partial | Trajectory) -> dict[str, TokenArray]:
    """Returns the arrays, for heads that fit. Raises `DecodeError` unless rows open to their stated
    size, and their numbers are finite.
    """
    arrays: dict[str, TokenArray] = {}
    for head, data in arrays_of(record).pieces:
        values = _decompressed(head, data)
        # NumPy's bool must be 0 or 1: other bytes are undefined behaviour.
        if head.dtype == "bool" and int(values.view(np.uint8).max()) > 1:
            raise DecodeError(f"array {head.name!r}: a truth value that is neither 0 nor 1")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise DecodeError(f"array {head.name!r}: a number that is not finite")
        arrays[head.name] = TokenArray(values, token_indices(head.ranges))
    return arrays


def arrays_problem(record: Partial | Trajectory) -> str:
    """Returns why the rows cannot be trained on (`trainable_arrays`), or ""."""
    try:
        trainable_arrays(record)
    except DecodeError as error:
        return str(error)
    return ""


def allowed_problem(
    array: TokenArray | None, tokens: Tokens, sources: Sources, vocabulary: int
) -> str:
    """Returns "" if each generated token was allowed, and a row has no more than a bit for each
    token of the `vocabulary`.
    """
    if array is None:
        return ""
    dtype, shape = array.values.dtype, array.values.shape[1:]
    if dtype != np.uint8 or len(shape) != 1 or shape[0] > -(-vocabulary // 8):
        return f"array {ALLOWED!r}: rows {dtype} {shape} for {vocabulary} tokens"
    is_generated = sources[array.tokens] == GENERATED
    rows, chosen = array.values[is_generated], tokens[array.tokens][is_generated].astype(np.int64)
    byte, bit = chosen >> 3, (chosen & 7).astype(np.uint8)
    if (byte >= shape[0]).any():
        return f"array {ALLOWED!r}: a generated token beyond its rows"
    if not ((rows[np.arange(len(rows)), byte] >> bit) & 1).all():
        return f"array {ALLOWED!r}: a generated token that was not allowed"
    return ""


def array_order_problem(links: Iterable[Sequence[ArrayHead]]) -> str:
    """Returns "" if no token has two rows of one array in these consecutive partials."""
    covered: dict[str, int] = {}
    for heads in links:
        for head in heads:
            if head.ranges[0].start < covered.get(head.name, 0):
                return f"array {head.name!r} has two rows of token {head.ranges[0].start}"
            covered[head.name] = head.ranges[-1].end
    return ""


def _row_bytes(head: ArrayHead) -> int:
    return prod(head.shape) * DTYPES[head.dtype].itemsize


def _row_bytes_in_all(head: ArrayHead) -> int:
    return _row_bytes(head) * sum(part.end - part.start for part in head.ranges)


def _decompressed(head: ArrayHead, data: bytes | memoryview) -> NDArray[Any]:
    size, at = _row_bytes_in_all(head), 0
    buffer = np.empty(size + 1, np.uint8)  # one more than stated: further bytes cost no memory
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(data, read_across_frames=True) as reader:
            # zstandard's stubs leave the buffer's type open.
            while at <= size and (count := reader.readinto(buffer[at:].data)):  # pyright: ignore[reportUnknownMemberType]
                at += count
    except zstandard.ZstdError as error:
        raise DecodeError(f"array {head.name!r} does not open ({error})") from error
    if at != size:
        raise DecodeError(f"array {head.name!r} opens to other bytes than the {size:,} of its rows")
    return buffer[:size].view(DTYPES[head.dtype]).reshape(-1, *head.shape)


def token_indices(ranges: Sequence[TokenRange]) -> NDArray[np.int64]:
    """Returns the indices of these ranges, of which there is at least one."""
    return np.concatenate([np.arange(part.start, part.end) for part in ranges])


def _merged(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    merged: list[TokenRange] = []
    for part in ranges:
        if merged and merged[-1].end == part.start:
            merged[-1] = TokenRange(merged[-1].start, part.end)
        else:
            merged.append(part)
    return tuple(merged)
