"""Holds the keys and values of a batch (`KVCache`) and computes attention over them: `attend` in a
decode step with one new token per row, `attend_ahead` in a pass that verifies several drafted ones.

The cache is a grid with a row for each running sequence and columns for its tokens. Attention reads
only the columns in use, segment by segment: a segment is a range of rows of similar length, for
which one call reads the columns from a common first one on (`rows.py`). Masks hide, in each row,
the columns that hold no token of its sequence.
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
    """Describes the keys and values (KV) of one token: 2 · `layers` · `heads` · `width` numbers.
    `heads` counts the KV heads; a query head has the same `width`.
    """

    layers: int
    heads: int
    width: int


class KVCache:
    """Holds the keys and values of all rows in `data` (2 · layers, slots + 1, heads, columns,
    width); layer l has its keys at 2l and its values at 2l + 1.

    The cache is aligned at the right: the newest tokens of all rows are in one column, and `column`
    is the column of every row's next token. A decode step writes this one column of all rows; the
    caller then advances `column`. A row is described by the column of its first token, so decode
    steps leave its mask unchanged; only rejected drafts leave columns to hide (`hide`). The last
    row is a spare for swaps.
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
        """Write a sequence's KV (2 · layers, heads, length, width; None: no token) to a row, such
        that its last token is in the column before `column`. Returns the column of the first token.
        """
        length = 0 if tokens is None else tokens.shape[2]
        start = self.column - length
        assert start >= 0, "align the cache before a longer sequence enters"
        if tokens is not None:
            self.data[:, row, :, start : self.column] = tokens
        self._mask_from(row, start)
        return start

    def read(self, row: int, start: int) -> torch.Tensor:
        """Returns a copy of a row's KV from column `start`, that of its first token, on:
        (2 · layers, heads, length, width).
        """
        return self.data[:, row, :, start : self.column].clone()

    def move(self, source: int, target: int, start: int) -> None:
        """Copy the sequence in row `source`, from column `start` on, to row `target`."""
        window = slice(start, self.column)
        self.data[:, target, :, window] = self.data[:, source, :, window]
        self.mask[target] = self.mask[source]

    def newest(self, layer: int, rows: int) -> torch.Tensor:
        """Returns a view (rows, heads, 2, width) of column `column`, into which the caller writes
        the key and value of each row's next token.
        """
        half, row, head, column, unit = self.data.stride()
        size = (rows, self.data.shape[2], 2, self.data.shape[4])
        offset = 2 * layer * half + self.column * column
        return self.data.as_strided(size, (row, head, half, unit), offset)

    def coming(self, layer: int, rows: int, count: int) -> torch.Tensor:
        """Returns a view (rows, count, heads, 2, width) of the next `count` columns, to be written
        likewise.
        """
        half, row, head, column, unit = self.data.stride()
        size = (rows, count, self.data.shape[2], 2, self.data.shape[4])
        offset = 2 * layer * half + self.column * column
        return self.data.as_strided(size, (row, column, head, half, unit), offset)

    def hide(self, rows: int, kept: torch.Tensor, columns: int) -> None:
        """Mask the next `columns` columns of each row except its first `kept` (rows,), because they
        hold rejected drafts: no later query attends to them.
        """
        ahead = torch.arange(columns, device=self.data.device)
        window = self.mask[:rows, self.column : self.column + columns]
        window.masked_fill_(ahead >= kept[:, None], -torch.inf)

    def seen(self, row: int, start: int) -> torch.Tensor:
        """Returns a copy of a row's KV from column `start` on, without its hidden columns."""
        window = slice(start, self.column)
        shown = (self.mask[row, window] == 0).nonzero()[:, 0]
        return self.data[:, row, :, window].index_select(2, shown)

    def window(self, layer: int, segment: RowSegment, part: int, ahead: int = 1) -> torch.Tensor:
        """Returns a view (rows · heads, columns, width) of the keys (`part` 0) or values (1) of a
        segment, the next `ahead` columns included.
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
        """Shift the columns in use (the segments `used`) so that the next column is `column`: to
        the left when columns run out, to the right before a longer sequence enters. `starts` holds
        each row's first column. No KV is recomputed, because keys contain their own positions.
        No column may be hidden (`hide`): the masks are made from `starts`. Returns by how many
        columns it shifted.
        """
        shift = column - self.column
        for segment in used:
            rows, old = slice(segment.begin, segment.end), slice(segment.column, self.column)
            new = slice(old.start + shift, column)
            assert new.start >= 0, "the longest row does not fit before the new column"
            for layer in self.data:
                layer[rows, :, new] = layer[rows, :, old].clone()  # the two may overlap
        self.column = column
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
    """Returns the attention output (rows, heads · width) of one layer in a decode step. `queries`
    (rows, KV heads, queries per KV head, width) are multiplied by the attention scale already.

    `used` are the segments of all rows and `masks` their `segment_masks`. The keys and values of
    the new tokens must be in the cache already, at `cache.column`.
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
    """Returns the attention output (rows · ahead, heads · width) of one layer in a pass over
    `ahead` new tokens per row. `queries` (rows, ahead, KV heads, queries per KV head, width) are
    multiplied by the attention scale already.

    `masks` are those of `masks_ahead`. The keys and values of the new tokens must be in the cache
    already, from `cache.column` on.
    """
    rows, ahead, per_row, group, width = queries.shape
    together = queries.transpose(1, 2).reshape(rows, per_row, ahead * group, width)
    attended = _by_segment(_kind(queries), together, layer, cache, used, masks, ahead)
    apart = attended.view(rows, per_row, ahead, group * width).transpose(1, 2)
    return apart.reshape(rows * ahead, per_row * group * width)


def segment_masks(cache: KVCache, used: tuple[RowSegment, ...]) -> list[torch.Tensor]:
    """Returns a mask (rows of the segment, 1, 1, columns) per segment for `attend`; its last column
    is that of the new tokens.
    """
    end = cache.column + 1
    return [
        cache.mask[segment.begin : segment.end, None, None, segment.column : end]
        for segment in used
    ]


def masks_ahead(
    cache: KVCache, used: tuple[RowSegment, ...], ahead: int, group: int
) -> list[torch.Tensor]:
    """Returns a mask (rows of the segment, 1, ahead · group, columns) per segment for
    `attend_ahead`: of the next `ahead` columns a token attends to its own and the earlier ones.
    `group` is the number of queries per KV head.
    """
    end = cache.column + ahead
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
"""Attention over one segment, from (queries, layer, cache, segment, mask, ahead): queries (rows of
the segment, KV heads, queries, width) give (rows of the segment · KV heads, queries, width).
"""


def _kind(queries: torch.Tensor) -> SegmentAttention:
    """Returns the faster form of attention on the device of `queries`. On a CPU plain matrix
    products take about half the time of `scaled_dot_product_attention` at one query per row
    (measured at 64 rows × 64 columns: 80 µs against 175 µs); other devices use that function.
    """
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
    """Returns the attention of all rows, in their order; the next `ahead` columns of the cache are
    read too.
    """
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
