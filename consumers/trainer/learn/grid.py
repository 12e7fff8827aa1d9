"""The rows of a micro-batch as the rectangular batch that transformers' forward needs.

The grid is as wide as the longest sequence. Packed, several shorter sequences share a row;
unpacked, each sequence has a row of its own. Positions continue in the unused rest of a row: under
causal attention no sequence attends to what follows it, so the rest needs no mask. Pure: equal rows
give an equal grid.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollstream.consumers.trainer.learn.row_layout import TokenRows

GridCell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """`tokens`, `positions` and `mask` are [R, W]; positions restart at 0 with each sequence,
    `mask` is 1 where a cell has a token of a sequence. `scored` [G] are `Rows.scored` as indices
    into R · W.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    scored: Tensor


def token_grid(rows: TokenRows, packed: bool) -> TokenGrid:
    """The grid of these rows, on their device; it is planned on the host."""
    width = max(rows.lengths)
    places = (
        first_fit(rows.lengths, width) if packed else [(i, 0) for i in range(len(rows.lengths))]
    )
    count = 1 + max(row for row, _ in places)
    source, mask = np.zeros(count * width, np.int64), np.zeros(count * width, np.int64)
    positions = np.tile(np.arange(width), count)
    where = np.zeros(len(rows.tokens), np.int64)
    for (row, column), begin, length in zip(places, _first_rows(rows), rows.lengths, strict=True):
        at, end = row * width + column, (row + 1) * width
        source[at : at + length] = np.arange(begin, begin + length)
        where[begin : begin + length] = np.arange(at, at + length)
        mask[at : at + length] = 1
        positions[at:end] = np.arange(end - at)
    device = rows.tokens.device
    return TokenGrid(
        rows.tokens[torch.from_numpy(source).to(device)].view(count, width),
        torch.from_numpy(positions).to(device).view(count, width),
        torch.from_numpy(mask).to(device).view(count, width),
        torch.from_numpy(where).to(device).index_select(0, rows.scored),
    )


def first_fit(lengths: Sequence[int], width: int) -> list[GridCell]:
    """Row and column of each sequence, in their order: the first row with room for it. For
    descending lengths this needs at most 11/9 of the fewest possible rows, plus one (Dósa 2007).
    """
    used: list[int] = []
    places: list[GridCell] = []
    for length in lengths:
        row = next((i for i, taken in enumerate(used) if taken + length <= width), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row]))
        used[row] += length
    return places


def _first_rows(rows: TokenRows) -> list[int]:
    """The first row of each sequence."""
    return [block.start + i * block.length for block in rows.blocks for i in range(block.sequences)]
