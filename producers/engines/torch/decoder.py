"""What the torch engine needs of a model: logits or KV (attention keys and values). The engine
draws the tokens and decides what runs.
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
    """For each of m sequences `new` tokens, and the KV of `cached` tokens before them, both padded
    on the left.

    `ids` and `positions` (in the sequence) are (m, new). `mask` (m, 1, new, cached + new) is added
    to attention scores, 0 or -inf; every token attends at least to itself, so that padding stays
    finite. `past` is the cached KV (2 · layers, m, heads, cached, width), for each layer its keys
    and then its values; None if `cached` is 0.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    past: torch.Tensor | None
    routes: AdapterRoutes | None = None
    """The LoRA adapter of each of the m · new tokens; None without adapters."""


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """n tokens of the first `rows` rows, row after row: each row's newest token, whose KV is not
    cached yet, and then its draft, `ahead` tokens at most.

    `slots` (n,) is the place of each token in a grid of `rows` × `ahead`, numbered row by row; None
    if the tokens fill the grid.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    rows: int
    ahead: int
    routes: AdapterRoutes | None = None


class Decoder(Protocol):
    """Runs one model over a KV cache. `used` are the segments of the rows, each with the column
    from which attention reads it; earlier columns hold no KV of these rows.
    """

    vocabulary: int
    kv: KVShape
    dtype: torch.dtype
    device: torch.device
    segment_overhead_tokens: int | None
    """How many cached tokens attention reads in the time of one more call: the caller cuts off a
    segment only if this saves as many. None: it cuts off none.
    """

    served: ServedWeights
    """Zeros or random values until a version is loaded."""
    adapters: ServedAdapters | None
    """The LoRA adapters over these weights; None if the decoder cannot serve any."""

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        used: tuple[RowSegment, ...],
        routes: AdapterRoutes | None = None,
    ) -> torch.Tensor:
        """Returns the logits (n, vocabulary) after each row's newest token; `ids` and `positions`
        are (n,). Writes the tokens' KV to column `cache.column`; the caller then advances it.
        """
        ...

    def verify(
        self, drafted: DraftedTokens, cache: KVCache, used: tuple[RowSegment, ...]
    ) -> torch.Tensor:
        """Returns the logits (n, vocabulary) after each of the n tokens. Writes their KV from
        `cache.column` on; the caller then advances it and hides rejected tokens' columns. A row
        with fewer tokens leaves finite values in the rest.
        """
        ...

    def prefill(self, batch: PrefillBatch) -> torch.Tensor:
        """Returns the KV (2 · layers, m, heads, new, width), ordered as `past` is. Changes no
        cache.
        """
        ...
