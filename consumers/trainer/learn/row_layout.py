"""Lays a micro-batch out for the forward pass: as flat arrays with one row per input token
(`token_rows`), and from these as the rectangular grid that transformers' forward needs
(`token_grid`). `loss_inputs` has what the loss needs about the same tokens.

Everything except attention works row by row, so the flat form pads only where attention needs
equal lengths. Only trained tokens are scored. In all arrays over trained tokens they are in the
order of the samples, whatever the order in which sequences are laid out.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.consumers.trainer.data.prepare import lags_of
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.fused_ops import SequenceBlock
from rollstream.streams.branches import leaves
from rollstream.streams.records import GENERATED
from rollstream.streams.values import Tokens

# Largest number of padding rows in a block. In the smallest models one more block, that is one more
# attention call per layer, costs as much as about 12 rows (0.3 ms of calls against 25 µs a row,
# forward and backward); the bound is of that order. In large models a call costs fewer rows.
PADDING_ROWS_MAX = 24


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Holds N input rows, padding included, and the G trained tokens that they predict.

    `tokens` and `positions` [N] are the input of each row. Longer sequences come first; each of the
    `blocks` has some consecutive sequences, padded to equal length, and together they cover all
    rows. `lengths` are those of the sequences in row order, without padding. For each trained token
    `scored` [G] is the row of the token before it, whose output predicts it, `targets` [G] the
    token itself, and `temperature` [G] the temperature at which it was sampled.
    """

    tokens: Tensor
    positions: Tensor
    blocks: tuple[SequenceBlock, ...]
    lengths: tuple[int, ...]
    scored: Tensor
    targets: Tensor
    temperature: Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Holds what the loss needs for each of the G trained tokens besides their scores.

    `behaviour` [G] is the log-probability that the engine recorded when it sampled the token under
    the token's own version. `advantage` and `lag` (in versions) are [G] too. `sequence` [G] is the
    index of the token's sequence among those with a trained token, whose number is `sequences`.
    `prompt_share` [sequences] is 1 / (trained tokens of the sequence's group). `masked` counts the
    generated tokens that are not trained.
    """

    behaviour: Tensor
    advantage: Tensor
    sequence: Tensor
    sequences: int
    lag: Tensor
    prompt_share: Tensor
    masked: int


Batch = TypeVar("Batch", TokenRows, LossInputs)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns the same batch with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {n: v.to(device, non_blocking=True) for n, v in values.items() if isinstance(v, Tensor)}
    return replace(batch, **moved)


@dataclass(frozen=True, slots=True)
class PathRow:
    """Holds one path of a sample: its `tokens`, the positions of its trained tokens in it
    (`trained`), and the indices of these among all trained tokens of the sample (`order`). A sample
    without branches is one path.
    """

    tokens: Tokens
    trained: NDArray[np.int64]
    order: NDArray[np.int64]


def path_rows(sample: Sample) -> list[PathRow]:
    """Returns the paths of a sample that have a trained token of their own; its only path if none
    has one. A token that several paths share is trained in the first of them, and is context in the
    others, so each generated token is trained exactly once.
    """
    trained = _trained_indices(sample)
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
    """Returns the rows of a micro-batch; samples have any length ≥ 2 and any order. A sequence is a
    path of a sample (`path_rows`). It has rows only for the tokens before its last trained token,
    since no later one is scored: a long reply of the environment at its end costs nothing.
    """
    of_samples = [path_rows(sample) for sample in samples]
    paths = [path for rows in of_samples for path in rows]
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
    return TokenRows(
        torch.from_numpy(tokens),
        torch.from_numpy(positions),
        tuple(blocks),
        tuple(lengths[i] for i in order),
        torch.from_numpy(scored),
        torch.from_numpy(targets),
        torch.from_numpy(np.repeat(temperatures, counts)),
    )


def _scored_tokens(
    of_samples: Sequence[Sequence[PathRow]], begin: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the row before each trained token, and the token, in the order of the samples; within
    a sample in the order of its trained tokens. `begin` has the first row of each path.
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
    """Returns the loss inputs of the samples' trained tokens, in the order of `TokenRows.scored`;
    `version` is the number of the version that is trained from.
    """
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
    )


def given_reference(samples: Sequence[Sample]) -> Tensor:
    """Returns the log-probabilities [G] of the samples' trained tokens under the reference, which a
    scorer computed, in the order of `loss_inputs`.
    """
    logprobs: list[NDArray[np.float32]] = []
    for sample in samples:
        assert sample.reference is not None, f"{sample.trajectory} lacks its annotation"
        logprobs.append(sample.reference[sample.mask])
    return torch.from_numpy(np.concatenate(logprobs).astype(np.float32))


def _advantages(sample: Sample, count: int) -> NDArray[np.float32]:
    """Returns the advantage of each of the sample's `count` trained tokens."""
    if sample.advantages is None:
        return np.full(count, sample.advantage, np.float32)
    return sample.advantages[sample.mask].astype(np.float32)


def _trained_indices(sample: Sample) -> NDArray[np.int64]:
    """Returns the indices of the sample's trained tokens among all its tokens."""
    return np.flatnonzero(sample.sources == GENERATED)[sample.mask]


def _sequence_blocks(lengths: Sequence[int]) -> tuple[list[SequenceBlock], int]:
    """Returns blocks over sequences of these descending lengths, and their total number of rows.
    Neighbouring sequences of about equal length form a block, padded to the longest of them: at
    most `PADDING_ROWS_MAX` of its rows are padding, and one attention call serves all of it.
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
    """Holds the tokens of a `TokenRows` as a grid of R rows and W columns: `tokens`, `positions`
    and `mask` are [R, W]. Positions restart at 0 with each sequence; `mask` is 1 where a cell has a
    token of a sequence. `scored` [G] names the same tokens as `TokenRows.scored`, as indices into
    the R · W cells, row after row.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    scored: Tensor


def token_grid(rows: TokenRows, packed: bool, width: int | None = None) -> TokenGrid:
    """Returns the tokens as the rectangular batch that transformers' forward needs, on the device
    of `rows`; the layout is computed on the host.

    The grid is as wide as the longest sequence unless a `width` is given. Packed, several shorter
    sequences share a grid row, and the model must separate them by their positions; unpacked, each
    sequence has a grid row of its own. Positions continue in the unused rest of a grid row: under
    causal attention no token attends to what follows it, so the rest needs no mask.
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
        positions[at:end] = np.arange(end - at)
    device = rows.tokens.device
    return TokenGrid(
        rows.tokens[torch.from_numpy(source).to(device)].view(count, width),
        torch.from_numpy(positions).to(device).view(count, width),
        torch.from_numpy(mask).to(device).view(count, width),
        torch.from_numpy(cells).to(device).index_select(0, rows.scored),
    )


def first_fit(lengths: Sequence[int], width: int) -> list[GridCell]:
    """Returns grid row and first column of each sequence, in the order of `lengths`: each is put
    into the first grid row with room for it. For descending lengths this needs at most 11/9 of the
    fewest possible rows, plus one (Dósa 2007).
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
    """Returns the row in `TokenRows` at which each sequence begins."""
    return [block.start + i * block.length for block in rows.blocks for i in range(block.sequences)]
