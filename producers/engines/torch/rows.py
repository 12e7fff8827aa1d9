"""Keeps the rows of a batch: their order, in which attention reads little padding (`RowLayout`),
their newest tokens on the device (`TokenBuffer`), and the host state of their sequences
(`TorchSequence`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.queue import QueuedSequence
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.streams.values import Floats, Tokens


class TokenBuffer:
    """Buffers the newest generated tokens of all rows on the device, with the uniform numbers of
    the next steps: a block of steps × rows that is copied to the host on demand.

    `column` is the newest filled column, whose token is the input of a row's next step. `steps`
    columns fit beside column 0, which is copied from the last column of the previous block.
    """

    def __init__(self, steps: int, rows: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        self.column = 0
        self.tokens = torch.zeros(steps + 1, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(steps + 1, rows, dtype=torch.float32, device=device)
        self._drawn: NDArray[np.float64] = np.zeros((steps + 1, rows))
        self._uniforms = torch.from_numpy(self._drawn).to(device)  # pyright: ignore[reportUnknownMemberType]  # shares memory on a CPU
        self._on_host: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    @property
    def full(self) -> bool:
        return self.column == self.steps

    def inputs(self, rows: int) -> torch.Tensor:
        """Return the (rows,) input tokens of the next step."""
        return self.tokens[self.column, :rows]

    def next_uniforms(self, rows: int) -> torch.Tensor:
        """Return the (rows, 1) uniform numbers with which the next step draws its tokens."""
        return self._uniforms[self.column + 1, :rows, None]

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Add the (rows, 1) tokens and log-probabilities of one step."""
        self.column += 1
        rows = tokens.shape[0]
        self.tokens[self.column, :rows] = tokens[:, 0]
        self.logprobs[self.column, :rows] = logprobs[:, 0]
        self._on_host = None

    def enter(self, row: int, token: int, key: int, position: int) -> None:
        """Set a new sequence's newest token, at index `position` of the trajectory, as the next
        input of `row`.
        """
        self.tokens[self.column, row] = token
        self._draw(slice(row, row + 1), np.array([key], np.uint64), np.array([position]))

    def move(self, source: int, target: int) -> None:
        """Move the state that a row's next steps need; its earlier columns stay in `source`."""
        self.tokens[self.column, target] = self.tokens[self.column, source]
        self.logprobs[self.column, target] = self.logprobs[self.column, source]
        self._drawn[self.column + 1 :, target] = self._drawn[self.column + 1 :, source]
        self._on_host = None

    def restart(self, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        """Empty the block and keep the newest column as column 0; `positions` are the indices of
        the newest tokens.
        """
        rows = len(keys)
        self.tokens[0, :rows] = self.tokens[self.column, :rows]
        self.column = 0
        self._on_host = None
        self._draw(slice(0, rows), keys, positions)

    def push(self) -> None:
        """Copy the drawn uniforms to the device; call it after any `enter`, `move` or `restart`."""
        if self.device.type != "cpu":
            self._uniforms.copy_(torch.from_numpy(self._drawn), non_blocking=True)  # pyright: ignore[reportUnknownMemberType]

    def read(self, pieces: list[tuple[int, int, int]]) -> tuple[Tokens, Floats]:
        """Return tokens and log-probabilities of the pieces `(row, first column, last column)`,
        joined.
        """
        if self._on_host is None:
            end = self.column + 1
            self._on_host = (
                self.tokens[:end].cpu().numpy(),
                self.logprobs[:end].cpu().numpy(),
            )
        tokens, logprobs = self._on_host
        return (
            np.concatenate([tokens[a : b + 1, row] for row, a, b in pieces]).astype(np.uint32),
            np.concatenate([logprobs[a : b + 1, row] for row, a, b in pieces]),
        )

    def _draw(self, rows: slice, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        ahead = np.arange(1, self.steps - self.column + 1)
        self._drawn[self.column + 1 :, rows] = uniforms(keys, positions + ahead[:, None])


RowMove = tuple[int, int]

# 48, 144, 432, …: the best classes in a test on the long-tailed trace; finer ones move more rows.
CLASS_FIRST, CLASS_GROWTH = 48, 3


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Names rows `[begin, end)`, for which one attention call reads the columns from `column`."""

    begin: int
    end: int
    column: int


def length_classes(context_max: int) -> tuple[int, ...]:
    """Return the longest length of every class but the last, ascending."""
    bounds: list[int] = []
    bound = CLASS_FIRST
    while bound < context_max:
        bounds.append(bound)
        bound *= CLASS_GROWTH
    return tuple(bounds)


class RowLayout:
    """Orders the rows such that attention reads little padding. Rows of similar length are
    neighbours: there is a region per length class, and region 0 has the longest class.

    Rows in use are packed at the front. The last row of a region replaces a row that leaves it, the
    last row of the next region replaces that one, and so on. All rows grow by one token per step,
    so a row rarely changes its region. The layout only counts and plans: methods return the moves
    `(from, to)` that the caller makes in order. `spare` is a row outside of the batch for swaps.
    """

    def __init__(self, bounds: Sequence[int], spare: int) -> None:
        self.ceilings: tuple[float, ...] = (float("inf"), *reversed(bounds))
        self.counts = [0] * len(self.ceilings)
        self.spare = spare

    def region(self, length: int) -> int:
        """Return the region of a row of this length."""
        return max(r for r, ceiling in enumerate(self.ceilings) if length <= ceiling)

    def insert(self, region: int) -> tuple[int, list[RowMove]]:
        """Add a row to this region. Returns its index and the moves after which it is free."""
        hole = sum(self.counts)
        moves: list[RowMove] = []
        for later in range(len(self.counts) - 1, region, -1):
            if self.counts[later]:
                first = sum(self.counts[:later])
                moves.append((first, hole))
                hole = first
        self.counts[region] += 1
        return hole, moves

    def remove(self, row: int) -> list[RowMove]:
        """Remove a row; the moves pack the others."""
        moves: list[RowMove] = []
        end, hole, is_past = 0, row, False
        for region, count in enumerate(self.counts):
            end += count
            if not is_past and row < end:
                is_past = True
                self.counts[region] -= 1
            if is_past and count and hole != end - 1:
                moves.append((end - 1, hole))
                hole = end - 1
        return moves

    def promote(self, row: int, region: int) -> list[RowMove]:
        """Move a row from its region to the next longer one; the moves swap it to the border
        between the two.
        """
        first = sum(self.counts[:region])
        self.counts[region] -= 1
        self.counts[region - 1] += 1
        return [] if row == first else [(row, self.spare), (first, row), (self.spare, first)]


def row_segments(
    counts: Sequence[int], columns: Sequence[int], overhead_tokens: int
) -> tuple[RowSegment, ...]:
    """Return the segments for attention calls. `counts` holds the rows of each region, `columns`
    the first column of its longest row.

    A region is merged with the one before it if the padding that it then reads costs less than a
    call of its own, which costs as much as reading `overhead_tokens`.
    """
    merged: list[RowSegment] = []
    begin = 0
    for count, column in zip(counts, columns, strict=True):
        if not count:
            continue
        end = begin + count
        if merged and count * (column - merged[-1].column) < overhead_tokens:
            last = merged[-1]
            merged[-1] = RowSegment(last.begin, end, min(last.column, column))
        else:
            merged.append(RowSegment(begin, end, column))
        begin = end
    return tuple(merged)


class TorchSequence(QueuedSequence):
    """Holds the host state of a trajectory: its tokens, and the places of its newest tokens on the
    device.

    `tokens[:length]` are on the host. While the sequence is in the batch (`row` ≥ 0), newer tokens
    are in the columns of the token buffer: first in `pieces` `(row, first column, last column)` of
    rows that it had before it moved, then in its own row from column `first` on.

    While the sequence is held, `parked` is the KV of its tokens without the newest generated one
    and those appended since.
    """

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        super().__init__(request, context_max)
        self.key = trajectory_key(request.seed, request.trajectory)
        self.tokens: Tokens = np.empty(self.limit, np.uint32)
        self.tokens[: self.length] = request.tokens
        self.parked: torch.Tensor | None = None
        self.row = -1
        self.first = 0
        self.pieces: list[tuple[int, int, int]] = []

    @property
    def prefix(self) -> Tokens:
        """The tokens that must be cached before the next step: all but the newest, which is the
        input of the step.
        """
        return self.tokens[: self.length - 1]

    @property
    def limit(self) -> int:
        """The length at which the turn ends: `tokens_max` generated tokens, or a full context."""
        return self.length + self.room

    def gain(self, tokens: Tokens) -> None:
        """Add generated tokens."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.generated += len(tokens)

    def append(self, tokens: Tokens) -> Tokens:
        before = self.tokens[: self.length]
        kept = super().append(tokens)
        self.tokens = np.concatenate((before, kept, np.empty(self.room, np.uint32)))
        return kept
