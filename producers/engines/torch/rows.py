"""Newest tokens are on the device (`TokenBuffer`), older ones on the host (`TorchSequence`), to
which tokens are copied once per block of steps.
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
    """Holds the newest tokens of all rows on the device. Column 0 has the newest tokens of the
    previous block, `column` is the newest filled one, the inputs of the next step. When the last
    column is filled (`full`), the caller reads all rows and calls `restart`.
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
        return self.tokens[self.column, :rows]

    def next_uniforms(self, rows: int) -> torch.Tensor:
        return self._uniforms[self.column + 1, :rows, None]

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        self.column += 1
        rows = tokens.shape[0]
        self.tokens[self.column, :rows] = tokens[:, 0]
        self.logprobs[self.column, :rows] = logprobs[:, 0]
        self._on_host = None

    def enter(self, row: int, token: int, key: int, position: int) -> None:
        """Prepare a row: its newest `token`, at index `position` of the trajectory `key`, becomes
        the input of the next step.
        """
        self.tokens[self.column, row] = token
        self._draw(slice(row, row + 1), np.array([key], np.uint64), np.array([position]))

    def move(self, source: int, target: int) -> None:
        """Move a row; tokens of earlier columns stay in row `source`."""
        self.tokens[self.column, target] = self.tokens[self.column, source]
        self.logprobs[self.column, target] = self.logprobs[self.column, source]
        self._drawn[self.column + 1 :, target] = self._drawn[self.column + 1 :, source]
        self._on_host = None

    def restart(self, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        """Begin a new block; `positions` are the indices of the rows' newest tokens."""
        rows = len(keys)
        self.tokens[0, :rows] = self.tokens[self.column, :rows]
        self.column = 0
        self._on_host = None
        self._draw(slice(0, rows), keys, positions)

    def push(self) -> None:
        """Copy the random numbers to the device, after `enter`, `move` or `restart` and before a
        step.
        """
        if self.device.type != "cpu":
            self._uniforms.copy_(torch.from_numpy(self._drawn), non_blocking=True)  # pyright: ignore[reportUnknownMemberType]

    def read(self, pieces: list[tuple[int, int, int]]) -> tuple[Tokens, Floats]:
        """Returns tokens and log-probabilities in pieces `(row, first column, last column)`, of one
        sequence.
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
        # The rest of the block.
        ahead = np.arange(1, self.steps - self.column + 1)
        self._drawn[self.column + 1 :, rows] = uniforms(keys, positions + ahead[:, None])


RowMove = tuple[int, int]

# Length classes end at 48, 144, 432, … tokens. These were the best in a test on a trace with
# long-tailed lengths; with finer classes more rows are moved.
CLASS_FIRST, CLASS_GROWTH = 48, 3


@dataclass(frozen=True, slots=True)
class RowSegment:
    """The rows `[begin, end)`, for which attention reads the KV cache from `column` on."""

    begin: int
    end: int
    column: int


def length_classes(context_max: int) -> tuple[int, ...]:
    """Returns the largest length of every class, ascending, without the last class, which has no
    bound.
    """
    bounds: list[int] = []
    bound = CLASS_FIRST
    while bound < context_max:
        bounds.append(bound)
        bound *= CLASS_GROWTH
    return tuple(bounds)


class RowLayout:
    """There is a region of rows for each length class; region 0 has the longest rows.

    The used rows have the indices from 0 on, without gaps. The methods return moves `(from, to)`,
    which the caller makes in this order. `spare` is the index of a row outside of the batch, for
    swaps.
    """

    def __init__(self, bounds: Sequence[int], spare: int) -> None:
        self.ceilings: tuple[float, ...] = (float("inf"), *reversed(bounds))
        self.counts = [0] * len(self.ceilings)
        self.spare = spare

    def region(self, length: int) -> int:
        return max(r for r, ceiling in enumerate(self.ceilings) if length <= ceiling)

    def insert(self, region: int) -> tuple[int, list[RowMove]]:
        """Returns the new row's index, and the moves that make it free."""
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
        moves: list[RowMove] = []
        end, hole, is_past = 0, row, False
        for region, count in enumerate(self.counts):
            end += count
            if not is_past and row < end:
                is_past = True
                self.counts[region] -= 1
            # The last row of its region takes its place, the last row of the next region that
            # one's, and so on.
            if is_past and count and hole != end - 1:
                moves.append((end - 1, hole))
                hole = end - 1
        return moves

    def promote(self, row: int, region: int) -> list[RowMove]:
        first = sum(self.counts[:region])
        self.counts[region] -= 1
        self.counts[region - 1] += 1
        # Swapped with the first row of `region`, whose place then belongs to the region before.
        return [] if row == first else [(row, self.spare), (first, row), (self.spare, first)]


def row_segments(
    counts: Sequence[int], columns: Sequence[int], overhead_tokens: int
) -> tuple[RowSegment, ...]:
    """`counts` holds the number of rows of each region, `columns` the column in which its longest
    row begins.
    """
    merged: list[RowSegment] = []
    begin = 0
    for count, column in zip(counts, columns, strict=True):
        if not count:
            continue
        end = begin + count
        # The region joins the one before it, and is read with padding, if that costs less than a
        # call of its own, which costs as much as reading `overhead_tokens`.
        if merged and count * (column - merged[-1].column) < overhead_tokens:
            last = merged[-1]
            merged[-1] = RowSegment(last.begin, end, min(last.column, column))
        else:
            merged.append(RowSegment(begin, end, column))
        begin = end
    return tuple(merged)


class TorchSequence(QueuedSequence):
    """One trajectory on the host: `tokens[:length]`. While the sequence is in the batch (`row` ≥
    0), newer tokens are in the `TokenBuffer`: first in `pieces` `(row, first column, last column)`,
    in rows that it had before it was moved, then in its present row from column `first` on.

    `parked` is the KV of a parked sequence, without the newest token, or None if there was no room
    for it.
    """

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        super().__init__(request, context_max)
        self.key = trajectory_key(request.seed, request.noise_name)
        self.tokens: Tokens = np.empty(self.limit, np.uint32)
        self.tokens[: self.length] = request.tokens
        self.parked: torch.Tensor | None = None
        self.row = -1
        self.first = 0
        self.pieces: list[tuple[int, int, int]] = []

    @property
    def prefix(self) -> Tokens:
        """The tokens of which the next step needs the KV: all but the newest."""
        return self.tokens[: self.length - 1]

    @property
    def limit(self) -> int:
        return self.length + self.room

    def gain(self, tokens: Tokens) -> None:
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.generated += len(tokens)

    def append(self, tokens: Tokens, noise: str) -> Tokens:
        before = self.tokens[: self.length]
        appended = super().append(tokens, noise)
        self.key = trajectory_key(self.request.seed, self.request.noise_name)
        self.tokens = np.concatenate((before, appended, np.empty(self.room, np.uint32)))
        return appended
