"""The decoder contract: a model's decode step, verification pass and prefill, and its served
weights.

Two decoders implement it: `llama.py` for the Llama and Qwen families, `hf_decoder.py` for others.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from rollstream.producers.engines.torch.adapters import AdapterRoutes, ServedAdapters
from rollstream.producers.engines.torch.attention import KVCache, KVShape
from rollstream.producers.engines.torch.rows import RowSegment
from rollstream.producers.engines.torch.weights import ServedWeights


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The input of one prefill pass: m sequences of `new` tokens each, right-aligned, after
    `cached` columns of KV.

    `ids` and `positions` are (m, new). `mask` (m, 1, new, cached + new) is added to attention
    scores; every query attends at least to itself, so that padding stays finite. `past` holds the
    cached KV (2 · layers, m, heads, cached, width), keys and values of each layer in turn; None
    without cached columns.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    past: torch.Tensor | None
    routes: AdapterRoutes | None = None
    """The adapters of the m · new tokens."""


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The input of a verification pass: n tokens of the rows 0 to `rows` - 1, at most `ahead` per
    row. A row's tokens are consecutive and in order.

    `ids` and `positions` are (n,). `slots` (n,) is row · ahead + index within the row; None if
    every row has `ahead` tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    rows: int
    ahead: int
    routes: AdapterRoutes | None = None
    """The adapters of the n tokens."""


class Decoder(Protocol):
    """A decoder runs one model on one device, over a KV cache with one row per running sequence.
    `used` names the cache columns that each segment of rows attends to; earlier columns hold no KV
    of these rows.
    """

    vocabulary: int
    kv: KVShape
    dtype: torch.dtype
    device: torch.device
    segment_overhead_tokens: int | None
    """Row-tokens of attention that cost as much as one more attention call per layer; None: the
    batch is never split into segments.
    """

    served: ServedWeights
    """The weights; zeros or random values until weights are loaded."""
    adapters: ServedAdapters | None
    """The adapters over these weights; None where the decoder cannot serve any."""

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        used: tuple[RowSegment, ...],
        routes: AdapterRoutes | None = None,
    ) -> torch.Tensor:
        """Logits (n, vocabulary) after one token of each of n rows. The tokens' KV is written to
        column `cache.column`, which is not advanced. `routes` are the adapters of the rows.
        """
        ...

    def verify(
        self, drafted: DraftedTokens, cache: KVCache, used: tuple[RowSegment, ...]
    ) -> torch.Tensor:
        """Logits (n, vocabulary) after each drafted token. The tokens' KV is written from column
        `cache.column` on, which is not advanced. A row with fewer than `ahead` tokens leaves finite
        values in its remaining columns.
        """
        ...

    def prefill(self, batch: PrefillBatch) -> torch.Tensor:
        """The KV of the new tokens (2 · layers, m, heads, new, width), in the order of `past`."""
        ...
