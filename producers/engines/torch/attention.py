"""Attention over the columns in use, segment by segment: of a decode step with one query per row,
or of a verification pass with several.

On a CPU plain matrix products take about half the time of `scaled_dot_product_attention` at one
query per row (measured at 64 rows × 64 columns: 80 µs against 175); on other devices that function
is used.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rollstream.producers.engines.torch.kv_cache import KVCache
from rollstream.producers.engines.torch.rows import RowSegment


def attend(
    queries: torch.Tensor,
    layer: int,
    cache: KVCache,
    used: tuple[RowSegment, ...],
    masks: list[torch.Tensor],
) -> torch.Tensor:
    """Attention output (rows, heads · width) for scaled queries (rows, kv heads, queries per kv
    head, width).

    `masks` are those of `segment_masks`; the newest column must be written already.
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
    """Attention output (rows · ahead, heads · width) for scaled queries (rows, ahead, kv heads,
    queries per kv head, width). `masks` are those of `masks_ahead`; the next `ahead` columns must
    be written already.
    """
    rows, ahead, per_row, group, width = queries.shape
    together = queries.transpose(1, 2).reshape(rows, per_row, ahead * group, width)
    attended = _by_segment(_kind(queries), together, layer, cache, used, masks, ahead)
    apart = attended.view(rows, per_row, ahead, group * width).transpose(1, 2)
    return apart.reshape(rows * ahead, per_row * group * width)


def segment_masks(cache: KVCache, used: tuple[RowSegment, ...]) -> list[torch.Tensor]:
    """One mask per segment, (rows of the segment, 1, 1, columns), the newest column included."""
    end = cache.column + 1
    return [
        cache.mask[segment.begin : segment.end, None, None, segment.column : end]
        for segment in used
    ]


def masks_ahead(
    cache: KVCache, used: tuple[RowSegment, ...], ahead: int, group: int
) -> list[torch.Tensor]:
    """One mask per segment, (rows of the segment, 1, ahead · group, columns): of the next `ahead`
    columns a token attends to its own and those before it.
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
"""Attention over one segment: queries (rows of the segment, kv heads, queries, width) give
(rows of the segment · kv heads, queries, width)."""


def _kind(queries: torch.Tensor) -> SegmentAttention:
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
    """Attention of all rows; the next `ahead` columns of the cache are read too."""
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
