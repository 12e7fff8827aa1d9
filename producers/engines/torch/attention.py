"""The keys and values of a batch, and attention over them in a decode step or a verification pass,
one call for each segment, a range of rows of similar length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rollstream.producers.engines.torch.rows import RowSegment

# Columns beyond the longest context, so at least as many steps lie between two shifts of the
# columns (`KVCache.align`). A shift costs about as much as two steps.
SPARE_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class KVShape:
    """One token has 2 · `layers` · `heads` · `width` numbers; `heads` counts the KV heads."""

    layers: int
    heads: int
    width: int


class KVCache:
    """Keys and values in `data` (2 · layers, slots + 1, heads, columns, width); layer l has its
    keys at 2l and its values at 2l + 1. The last row is a spare for swaps.

    The cache is aligned at the right: the newest tokens of all rows are in one column, and `column`
    is that of every row's next token.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        context_max: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.columns = context_max + SPARE_COLUMNS
        self.column = 0
        # Zeros, not empty memory: masked columns are still multiplied by 0, and 0 · NaN is NaN.
        self.data = torch.zeros(
            2 * shape.layers,
            slots + 1,
            shape.heads,
            self.columns,
            shape.width,
            dtype=dtype,
            device=device,
        )
        self.keys = list(self.data[0::2].unbind(0))
        self.values = list(self.data[1::2].unbind(0))
        self.mask = torch.zeros(slots + 1, self.columns, dtype=dtype, device=device)
        """Added to scores: -inf before a row's first column and at hidden ones, 0 elsewhere."""
        self._ramp = torch.zeros(2 * self.columns, dtype=dtype, device=device)
        self._ramp[: self.columns] = -torch.inf

    def write(self, row: int, tokens: torch.Tensor | None) -> int:
        """Write a sequence's KV (2 · layers, heads, length, width; None: no token) before `column`;
        returns the column of its first token.
        """
        length = 0 if tokens is None else tokens.shape[2]
        start = self.column - length
        assert start >= 0, "align the cache before a longer sequence enters"
        if tokens is not None:
            self.data[:, row, :, start : self.column] = tokens
        self._mask_from(row, start)
        return start

    def read(self, row: int, start: int) -> torch.Tensor:
        """Returns a copy of a row's KV from `start` on: (2 · layers, heads, length, width)."""
        return self.data[:, row, :, start : self.column].clone()

    def move(self, source: int, target: int, start: int) -> None:
        window = slice(start, self.column)
        self.data[:, target, :, window] = self.data[:, source, :, window]
        self.mask[target] = self.mask[source]

    def newest(self, layer: int, rows: int) -> torch.Tensor:
        """Returns a view (rows, heads, 2, width) of column `column`, for each row's next key and
        value.
        """
        half, row, head, column, unit = self.data.stride()
        size = (rows, self.data.shape[2], 2, self.data.shape[4])
        offset = 2 * layer * half + self.column * column
        return self.data.as_strided(size, (row, head, half, unit), offset)

    def coming(self, layer: int, rows: int, count: int) -> torch.Tensor:
        """Returns a view (rows, count, heads, 2, width) of the next `count` columns."""
        half, row, head, column, unit = self.data.stride()
        size = (rows, count, self.data.shape[2], 2, self.data.shape[4])
        offset = 2 * layer * half + self.column * column
        return self.data.as_strided(size, (row, column, head, half, unit), offset)

    def hide(self, rows: int, counts: torch.Tensor, columns: int) -> None:
        """Mask the next `columns` columns of each row, rejected drafts, except its first `counts`
        (rows,).
        """
        ahead = torch.arange(columns, device=self.data.device)
        window = self.mask[:rows, self.column : self.column + columns]
        window.masked_fill_(ahead >= counts[:, None], -torch.inf)

    def seen(self, row: int, start: int) -> torch.Tensor:
        """Returns a copy of a row's KV from column `start` on, without its hidden columns."""
        window = slice(start, self.column)
        shown = (self.mask[row, window] == 0).nonzero()[:, 0]
        return self.data[:, row, :, window].index_select(2, shown)

    def window(self, layer: int, segment: RowSegment, part: int, ahead: int = 1) -> torch.Tensor:
        """Returns a view (rows · heads, columns, width) of keys (`part` 0) or values (1), the next
        `ahead` columns included.
        """
        half, row, head, column, unit = self.data.stride()
        heads = self.data.shape[2]
        size = (
            (segment.end - segment.begin) * heads,
            self.column + ahead - segment.column,
            self.data.shape[4],
        )
        offset = (2 * layer + part) * half + segment.begin * row + segment.column * column
        return self.data.as_strided(size, (head, column, unit), offset)

    def align(self, column: int, used: tuple[RowSegment, ...], starts: list[int]) -> int:
        """Shift the columns in use so that the next is `column`; returns the shift. `starts` holds
        each row's first column. No column may be hidden.
        """
        shift = column - self.column
        for segment in used:
            rows, old = slice(segment.begin, segment.end), slice(segment.column, self.column)
            new = slice(old.start + shift, column)
            assert new.start >= 0, "the longest row does not fit before the new column"
            # No KV is recomputed, because keys contain their own positions.
            for layer in self.data:
                layer[rows, :, new] = layer[rows, :, old].clone()  # the two may overlap
        self.column = column
        # From `starts`, so a hidden column would reappear.
        for row, start in enumerate(starts):
            self._mask_from(row, start + shift)
        return shift

    def _mask_from(self, row: int, start: int) -> None:
        self.mask[row] = self._ramp[self.columns - start : 2 * self.columns - start]


def attend(
    queries: torch.Tensor,
    layer: int,
    cache: KVCache,
    used: tuple[RowSegment, ...],
    masks: list[torch.Tensor],
) -> torch.Tensor:
    """Returns (rows, heads · width). `queries` (rows, KV heads, queries per KV head, width) are
    scaled already, `masks` are the `segment_masks` of `used`.
    """
    attended = _by_segment(_kind(queries), queries, layer, cache, used, masks, 1)
    return attended.reshape(queries.shape[0], -1)


def attend_ahead(
    queries: torch.Tensor,
    layer: int,
    cache: KVCache,
    used: tuple[RowSegment, ...],
    masks: list[torch.Tensor],
) -> torch.Tensor:
    """Returns (rows · ahead, heads · width), for `ahead` new tokens per row. `queries` (rows,
    ahead, KV heads, queries per KV head, width) are scaled already, `masks` are those of
    `masks_ahead`.
    """
    rows, ahead, per_row, group, width = queries.shape
    together = queries.transpose(1, 2).reshape(rows, per_row, ahead * group, width)
    attended = _by_segment(_kind(queries), together, layer, cache, used, masks, ahead)
    by_token = attended.view(rows, per_row, ahead, group * width).transpose(1, 2)
    return by_token.reshape(rows * ahead, per_row * group * width)


def segment_masks(cache: KVCache, used: tuple[RowSegment, ...]) -> list[torch.Tensor]:
    """Returns masks (rows of the segment, 1, 1, columns) for `attend`, up to the column of the new
    tokens.
    """
    end = cache.column + 1
    return [
        cache.mask[segment.begin : segment.end, None, None, segment.column : end]
        for segment in used
    ]


def masks_ahead(
    cache: KVCache, used: tuple[RowSegment, ...], ahead: int, group: int
) -> list[torch.Tensor]:
    """Returns masks (rows of the segment, 1, ahead · group, columns) for `attend_ahead`; `group` is
    the queries per KV head.
    """
    end = cache.column + ahead
    # Of the next columns a token attends to its own and the earlier ones.
    later = torch.full((ahead, ahead), -torch.inf, device=cache.mask.device, dtype=cache.mask.dtype)
    later = later.triu_(1).repeat_interleave(group, 0)
    masks: list[torch.Tensor] = []
    for segment in used:
        rows = cache.mask[segment.begin : segment.end, segment.column : end]
        mask = rows[:, None, None].repeat(1, 1, ahead * group, 1)
        mask[..., -ahead:] += later
        masks.append(mask)
    return masks


SegmentAttention = Callable[
    [torch.Tensor, int, KVCache, RowSegment, torch.Tensor, int], torch.Tensor
]
"""Attention over one segment: (queries, layer, cache, segment, mask, ahead), with queries (rows of
the segment, KV heads, queries, width), gives (rows of the segment · KV heads, queries, width).
"""


def _kind(queries: torch.Tensor) -> SegmentAttention:
    # On a CPU plain matrix products take about half the time of `scaled_dot_product_attention` at
    # one query per row (measured at 64 rows × 64 columns: 80 µs against 175 µs).
    return _products if queries.device.type == "cpu" else _fused


def _by_segment(
    kind: SegmentAttention,
    queries: torch.Tensor,
    layer: int,
    cache: KVCache,
    used: tuple[RowSegment, ...],
    masks: list[torch.Tensor],
    ahead: int,
) -> torch.Tensor:
    attended = [
        kind(queries[segment.begin : segment.end], layer, cache, segment, mask, ahead)
        for segment, mask in zip(used, masks, strict=True)
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _products(
    queries: torch.Tensor,
    layer: int,
    cache: KVCache,
    segment: RowSegment,
    mask: torch.Tensor,
    ahead: int,
) -> torch.Tensor:
    rows, per_row, many, width = queries.shape
    flat = queries.reshape(rows * per_row, many, width)
    scores = torch.bmm(flat, cache.window(layer, segment, 0, ahead).transpose(1, 2))
    scores.view(rows, per_row, many, -1).add_(mask)
    return torch.bmm(scores.softmax(-1), cache.window(layer, segment, 1, ahead))


def _fused(
    queries: torch.Tensor,
    layer: int,
    cache: KVCache,
    segment: RowSegment,
    mask: torch.Tensor,
    ahead: int,
) -> torch.Tensor:
    rows = slice(segment.begin, segment.end)
    window = slice(segment.column, cache.column + ahead)
    return F.scaled_dot_product_attention(
        queries,
        cache.keys[layer][rows, :, window],
        cache.values[layer][rows, :, window],
        attn_mask=mask.expand(-1, queries.shape[1], -1, -1),
        scale=1.0,
    ).flatten(0, 1)
