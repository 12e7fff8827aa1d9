"""Holds the parts of the batch that the engine `torch` decodes (`batch.py`), in which each running
sequence has a row.

`RowLayout` decides the order of the rows, so that attention reads little padding. `TokenBuffer`
holds the rows' newest tokens on the device that computes, and `TorchSequence` a sequence's older
tokens on the host: tokens are copied to the host once per block of steps, not at every step. The
batch itself keeps the KV cache in the order of the rows.
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
    """Buffers the newest generated tokens of all rows, and their log-probabilities, on the device:
    in a block with a column for each of `steps` steps, which `read` copies to the host. It also has
    the uniform random numbers with which the tokens of these steps are drawn; they are computed on
    the host, and `push` copies them to the device.

    `column` is the newest filled column: it has the tokens that are the inputs of the next step.
    Column 0 is filled when a block begins, with the newest tokens of the previous block. When the
    last column is filled (`full`), the caller reads all rows and calls `restart`.
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
        """Whether the block has no room for another step."""
        return self.column == self.steps

    def inputs(self, rows: int) -> torch.Tensor:
        """Returns the (rows,) input tokens of the next step."""
        return self.tokens[self.column, :rows]

    def next_uniforms(self, rows: int) -> torch.Tensor:
        """Returns the (rows, 1) uniform numbers with which the next step draws its tokens."""
        return self._uniforms[self.column + 1, :rows, None]

    def append(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Fill the next column with the (rows, 1) tokens and log-probabilities of one step."""
        self.column += 1
        rows = tokens.shape[0]
        self.tokens[self.column, :rows] = tokens[:, 0]
        self.logprobs[self.column, :rows] = logprobs[:, 0]
        self._on_host = None

    def enter(self, row: int, token: int, key: int, position: int) -> None:
        """Prepare `row` for a new sequence: its newest `token`, at index `position` of the
        trajectory `key`, becomes the input of the next step, and the next random numbers are those
        of this trajectory.
        """
        self.tokens[self.column, row] = token
        self._draw(slice(row, row + 1), np.array([key], np.uint64), np.array([position]))

    def move(self, source: int, target: int) -> None:
        """Move a row: its newest token and its next random numbers, which are all that its next
        steps need. Its tokens of earlier columns stay in the row `source`.
        """
        self.tokens[self.column, target] = self.tokens[self.column, source]
        self.logprobs[self.column, target] = self.logprobs[self.column, source]
        self._drawn[self.column + 1 :, target] = self._drawn[self.column + 1 :, source]
        self._on_host = None

    def restart(self, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        """Begin a new block; the newest column becomes its column 0. `keys` are the trajectories of
        the rows, `positions` the indices of their newest tokens in these.
        """
        rows = len(keys)
        self.tokens[0, :rows] = self.tokens[self.column, :rows]
        self.column = 0
        self._on_host = None
        self._draw(slice(0, rows), keys, positions)

    def push(self) -> None:
        """Copy the random numbers to the device. To be called after `enter`, `move` or `restart`,
        before the next step.
        """
        if self.device.type != "cpu":
            self._uniforms.copy_(torch.from_numpy(self._drawn), non_blocking=True)  # pyright: ignore[reportUnknownMemberType]

    def read(self, pieces: list[tuple[int, int, int]]) -> tuple[Tokens, Floats]:
        """Returns the tokens and log-probabilities of one sequence, which are in these pieces
        `(row, first column, last column)`: in several if its row was moved.
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
        """Compute the random numbers of these rows for the rest of the block."""
        ahead = np.arange(1, self.steps - self.column + 1)
        self._drawn[self.column + 1 :, rows] = uniforms(keys, positions + ahead[:, None])


RowMove = tuple[int, int]
"""A row's index before and after a move."""

# Length classes end at 48, 144, 432, … tokens. These were the best in a test on a trace with
# long-tailed lengths; with finer classes more rows are moved.
CLASS_FIRST, CLASS_GROWTH = 48, 3


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Names the rows `[begin, end)`, for which one attention call reads the KV cache from column
    `column` on: the column in which the longest of them begins.
    """

    begin: int
    end: int
    column: int


def length_classes(context_max: int) -> tuple[int, ...]:
    """Returns the largest length of every length class, ascending, without that of the last class,
    which has no bound.
    """
    bounds: list[int] = []
    bound = CLASS_FIRST
    while bound < context_max:
        bounds.append(bound)
        bound *= CLASS_GROWTH
    return tuple(bounds)


class RowLayout:
    """Orders the rows so that attention reads little padding. In the KV cache all rows end in one
    column, and longer rows begin in earlier ones. Attention reads neighbouring rows from the column
    in which the longest of them begins, so rows of similar length should be neighbours. There is a
    region of neighbouring rows for each length class; region 0 has the longest rows.

    The used rows have the indices from 0 on, without gaps. If a row leaves, the last row of its
    region takes its place, the last row of the next region takes the place of that one, and so on.
    All rows grow by one token per step, so a row rarely changes its region. The layout only counts
    and plans: its methods return moves `(from, to)`, which the caller makes in this order. `spare`
    is the index of a row outside of the batch, for swaps. `bounds` are the `length_classes`.
    """

    def __init__(self, bounds: Sequence[int], spare: int) -> None:
        self.ceilings: tuple[float, ...] = (float("inf"), *reversed(bounds))
        self.counts = [0] * len(self.ceilings)
        self.spare = spare

    def region(self, length: int) -> int:
        """Returns the region for a row of this length."""
        return max(r for r, ceiling in enumerate(self.ceilings) if length <= ceiling)

    def insert(self, region: int) -> tuple[int, list[RowMove]]:
        """Add a row to this region. Returns its index, and the moves that make this index free."""
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
        """Remove a row. Returns the moves that close the gap."""
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
        """Move a row that outgrew its length class from `region` to the region before it, that of
        the next longer class. The moves swap it with the first row of `region`, whose place then
        belongs to the region before.
        """
        first = sum(self.counts[:region])
        self.counts[region] -= 1
        self.counts[region - 1] += 1
        return [] if row == first else [(row, self.spare), (first, row), (self.spare, first)]


def row_segments(
    counts: Sequence[int], columns: Sequence[int], overhead_tokens: int
) -> tuple[RowSegment, ...]:
    """Returns the segments, for each of which attention is called once. `counts` holds the number
    of rows of each region, `columns` the column in which its longest row begins.

    A region is a segment of its own, or joins the segment of the region before it. That segment
    begins in an earlier column, so the region's rows are then read with padding. A region joins if
    this padding costs less than a call of its own, which costs as much as reading
    `overhead_tokens`.
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
    """Holds one trajectory of the engine on the host: its tokens, and where its newer tokens are on
    the device.

    `tokens[:length]` are on the host. While the sequence is in the batch (`row` ≥ 0), newer tokens
    are in the `TokenBuffer`: first in `pieces` `(row, first column, last column)`, in rows that it
    had before it was moved, then in its present row from column `first` on.

    A parked sequence, which waits for its environment's tokens, is not in the batch. `parked` is
    its KV, that of all tokens before the newest generated one, or None if there was no room for it.
    That token, and tokens appended after it, have no KV yet. `key` selects the trajectory's random
    numbers.
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
        """The tokens of which the next step needs the KV: all but the newest, which is the step's
        input.
        """
        return self.tokens[: self.length - 1]

    @property
    def limit(self) -> int:
        """The length at which the turn ends at the latest: with `tokens_max` generated tokens, or a
        full context.
        """
        return self.length + self.room

    def gain(self, tokens: Tokens) -> None:
        """Add generated tokens that were copied from the device."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.generated += len(tokens)

    def append(self, tokens: Tokens, noise: str) -> Tokens:
        """Add the environment's tokens, as `QueuedSequence.append` does, and room for the next
        turn.
        """
        before = self.tokens[: self.length]
        kept = super().append(tokens, noise)
        self.key = trajectory_key(self.request.seed, self.request.noise_name)
        self.tokens = np.concatenate((before, kept, np.empty(self.room, np.uint32)))
        return kept
