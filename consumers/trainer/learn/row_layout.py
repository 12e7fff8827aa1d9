"""Lays a micro-batch out as flat arrays with one row per input token, and as the grid of
transformers' forward. Only attention pads. Arrays over trained tokens are in the order of the
samples.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.consumers.objectives.losses.base import LossInputs
from rollstream.consumers.trainer.data.lags import lags_of
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.fused_ops import SequenceBlock
from rollstream.streams.branches import leaves
from rollstream.streams.token_arrays import ALLOWED
from rollstream.streams.values import Tokens

# In the smallest models one more block, that is one more attention call per layer, costs as much as
# about 12 rows (0.3 ms of calls against 25 µs a row, forward and backward); the bound is of that
# order.
PADDING_ROWS_MAX = 24


@dataclass(frozen=True, slots=True)
class TokenRows:
    """N input rows, padding included, and the G trained tokens that they predict. `tokens` and
    `positions` [N] are the input. The `blocks` of consecutive sequences, longer ones first, padded
    to equal length, cover all rows. `lengths` are those without padding. `scored` [G] is the row
    before each trained token, `targets` [G] the token, `temperature` [G] that of its sampling.

    Where engines chose from a part of the vocabulary, `allowed` [C, W] has the bits of the sets of
    C tokens (uint8, the lowest bit first), and `allowed_row` [G] the row there of each trained
    token, -1 if it was chosen from all.
    """

    tokens: Tensor
    positions: Tensor
    blocks: tuple[SequenceBlock, ...]
    lengths: tuple[int, ...]
    scored: Tensor
    targets: Tensor
    temperature: Tensor
    allowed: Tensor | None = None
    allowed_row: Tensor | None = None


Batch = TypeVar("Batch", TokenRows, LossInputs)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {n: v.to(device, non_blocking=True) for n, v in values.items() if isinstance(v, Tensor)}
    return replace(batch, **moved)


@dataclass(frozen=True, slots=True)
class PathRow:
    """A path of a sample (itself if it has no branches): `tokens`, the positions of its `trained`
    tokens, and their indices among all trained tokens of the sample (`order`).
    """

    tokens: Tokens
    trained: NDArray[np.int64]
    order: NDArray[np.int64]


def path_rows(sample: Sample) -> list[PathRow]:
    """Returns paths that have a trained token of their own; the only one if none has. Each
    generated token is trained in the first path that has it, and context in the others.
    """
    trained = sample.trained_tokens
    if not sample.branches:
        return [PathRow(sample.tokens, trained, np.arange(len(trained)))]
    order = np.full(len(sample.tokens), -1, np.int64)
    order[trained] = np.arange(len(trained))
    rows: list[PathRow] = []
    for path in leaves(len(sample.tokens), sample.branches):
        positions = np.flatnonzero(order[path] >= 0)
        if len(positions) or not len(trained):
            rows.append(PathRow(sample.tokens[path], positions, order[path[positions]]))
        order[path] = -1
        if not len(trained):
            break
    return rows


def token_rows(samples: Sequence[Sample]) -> TokenRows:
    """Samples have any length ≥ 2 and order. A sequence is a path of a sample."""
    of_samples = [path_rows(sample) for sample in samples]
    paths = [path for rows in of_samples for path in rows]
    # No row after the last scored one: a long reply of the environment at the end costs nothing.
    lengths = [int(path.trained[-1]) if len(path.trained) else 1 for path in paths]
    order = sorted(range(len(paths)), key=lambda i: -lengths[i])
    blocks, count = _sequence_blocks([lengths[i] for i in order])
    tokens, positions = np.zeros(count, np.int64), np.zeros(count, np.int64)
    begin = [0] * len(paths)
    in_order = iter(order)
    for block in blocks:
        end = block.start + block.sequences * block.length
        positions[block.start : end] = np.tile(np.arange(block.length), block.sequences)
        for row in range(block.start, end, block.length):
            index = next(in_order)
            begin[index] = row
            tokens[row : row + lengths[index]] = paths[index].tokens[: lengths[index]]
    scored, targets = _scored_tokens(of_samples, begin)
    temperatures = [np.float32(sample.temperature) for sample in samples]
    counts = [sum(len(path.trained) for path in rows) for rows in of_samples]
    allowed, allowed_row = _allowed_tokens(samples)
    return TokenRows(
        torch.from_numpy(tokens),
        torch.from_numpy(positions),
        tuple(blocks),
        tuple(lengths[i] for i in order),
        torch.from_numpy(scored),
        torch.from_numpy(targets),
        torch.from_numpy(np.repeat(temperatures, counts)),
        allowed,
        allowed_row,
    )


def _allowed_tokens(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    if not any(sample.arrays for sample in samples):
        return None, None
    sets: list[NDArray[np.uint8]] = []
    places: list[NDArray[np.int64]] = []
    count = 0
    for sample in samples:
        tokens = sample.trained_tokens
        array = sample.arrays.get(ALLOWED) if len(tokens) else None
        place = np.full(len(tokens), -1, np.int64)
        if array is not None:
            rows, is_covered = array.at(tokens)
            sets.append(rows[is_covered])
            place[is_covered] = np.arange(count, count + len(sets[-1]))
            count += len(sets[-1])
        places.append(place)
    if not count:
        return None, None
    width = max(rows.shape[1] for rows in sets)
    padded = [np.pad(rows, ((0, 0), (0, width - rows.shape[1]))) for rows in sets]
    return torch.from_numpy(np.concatenate(padded)), torch.from_numpy(np.concatenate(places))


def _scored_tokens(
    of_samples: Sequence[Sequence[PathRow]], begin: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row before each trained token, and the token, in the order of samples. `begin` has the
    first row of each path.
    """
    scored: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    first = 0
    for paths in of_samples:
        rows = zip(paths, begin[first : first + len(paths)], strict=True)
        before = np.concatenate([path.trained + row - 1 for path, row in rows])
        tokens = np.concatenate([path.tokens[path.trained] for path in paths])
        order = np.argsort(np.concatenate([path.order for path in paths]))
        scored.append(before[order])
        targets.append(tokens[order].astype(np.int64))
        first += len(paths)
    return np.concatenate(scored), np.concatenate(targets)


def loss_inputs(samples: Sequence[Sample], version: int) -> LossInputs:
    """Returns the loss inputs in the order of `TokenRows.scored`, trained from `version`."""
    tokens = [int(np.count_nonzero(sample.mask)) for sample in samples]
    trained = [(sample, count) for sample, count in zip(samples, tokens, strict=True) if count]
    counts = [count for _, count in trained]
    behaviour = [sample.logprobs[sample.mask] for sample in samples]
    lags = [lags_of(sample, version)[sample.mask] for sample in samples]
    advantages = [np.zeros(0, np.float32), *(_advantages(s, count) for s, count in trained)]
    shares = np.array([1 / (sample.group_tokens or count) for sample, count in trained])
    return LossInputs(
        torch.from_numpy(np.concatenate(behaviour).astype(np.float32)),
        torch.from_numpy(np.concatenate(advantages)),
        torch.from_numpy(np.repeat(np.arange(len(trained)), counts)),
        len(trained),
        torch.from_numpy(np.concatenate(lags)),
        torch.from_numpy(shares.astype(np.float32)),
        sum(len(sample.mask) for sample in samples) - sum(tokens),
        samples,
    )


def given_reference(samples: Sequence[Sample]) -> Tensor:
    """Returns log-probabilities [G] under the reference, as a scorer computed them."""
    logprobs: list[NDArray[np.float32]] = []
    for sample in samples:
        assert sample.reference is not None, f"{sample.trajectory} lacks its annotation"
        logprobs.append(sample.reference[sample.mask])
    return torch.from_numpy(np.concatenate(logprobs).astype(np.float32))


def _advantages(sample: Sample, count: int) -> NDArray[np.float32]:
    if sample.advantages is None:
        return np.full(count, sample.advantage, np.float32)
    return sample.advantages[sample.mask].astype(np.float32)


def _sequence_blocks(lengths: Sequence[int]) -> tuple[list[SequenceBlock], int]:
    """Returns blocks over these descending lengths, and their number of rows: neighbours padded to
    the longest, at most `PADDING_ROWS_MAX` rows of padding each.
    """
    blocks: list[SequenceBlock] = []
    rows = first = padding = 0
    for i, length in enumerate(lengths):
        padding += lengths[first] - length
        if padding > PADDING_ROWS_MAX:
            blocks.append(SequenceBlock(rows, i - first, lengths[first]))
            rows += (i - first) * lengths[first]
            first, padding = i, 0
    blocks.append(SequenceBlock(rows, len(lengths) - first, lengths[first]))
    return blocks, rows + (len(lengths) - first) * lengths[first]


GridCell = tuple[int, int]
"""Row and column in a `TokenGrid`."""


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """`tokens`, `positions` and `mask` are [R, W]. Positions restart at 0 with each sequence;
    `mask` is 1 where a cell has a token. `scored` [G] are indices into the R · W cells.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    scored: Tensor


def token_grid(rows: TokenRows, packed: bool, width: int | None = None) -> TokenGrid:
    """Returns the token grid on the device of `rows`, as wide as the longest sequence unless a
    `width` is given. Packed, several sequences share a grid row, and the model must separate them
    by their positions.
    """
    width = width or max(rows.lengths)
    places = (
        first_fit(rows.lengths, width) if packed else [(i, 0) for i in range(len(rows.lengths))]
    )
    count = 1 + max(row for row, _ in places)
    source, mask = np.zeros(count * width, np.int64), np.zeros(count * width, np.int64)
    positions = np.tile(np.arange(width), count)
    cells = np.zeros(len(rows.tokens), np.int64)
    for (row, column), begin, length in zip(places, _first_rows(rows), rows.lengths, strict=True):
        at, end = row * width + column, (row + 1) * width
        source[at : at + length] = np.arange(begin, begin + length)
        cells[begin : begin + length] = np.arange(at, at + length)
        mask[at : at + length] = 1
        # Positions continue in the rest of a grid row, which needs no mask: under causal attention
        # no token attends to what follows it.
        positions[at:end] = np.arange(end - at)
    device = rows.tokens.device
    return TokenGrid(
        rows.tokens[torch.from_numpy(source).to(device)].view(count, width),
        torch.from_numpy(positions).to(device).view(count, width),
        torch.from_numpy(mask).to(device).view(count, width),
        torch.from_numpy(cells).to(device).index_select(0, rows.scored),
    )


def first_fit(lengths: Sequence[int], width: int) -> list[GridCell]:
    """Returns grid row and first column of each sequence, in the first row with room. For
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
    return [block.start + i * block.length for block in rows.blocks for i in range(block.sequences)]
