"""What the batch asks of a model: one decode step, a prefill, and taking new weights in place.

Two decoders keep this contract: `fused.py` for the Llama and Qwen families, `generic.py` for the
rest.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from producers.engines.torch_engine.cache import KVCache, KVShape
from producers.engines.torch_engine.order import Segment
from producers.engines.torch_engine.weights import ServedWeights


@dataclass(frozen=True, slots=True)
class Prefill:
    """m sequences, right-aligned: `past` columns that are cached already, then `ids.shape[1]` new
    tokens.

    `mask` (m, 1, new, past + new) is added to attention scores; every query sees at least itself,
    so that padding stays finite. `past` is (2 · layers, m, heads, past, width), None for none.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    past: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Drafted:
    """n tokens of the rows [0, `rows`), each row's in order, at most `ahead` of one row.

    `ids` and `positions` are (n,); `slots` (n,) is row · ahead + place in the row, None where every
    row has `ahead` tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    rows: int
    ahead: int


class Decoder(Protocol):
    vocabulary: int
    kv: KVShape
    dtype: torch.dtype
    device: torch.device
    segment_overhead_tokens: int | None
    """Row-tokens of attention that cost as much as one more attention call per layer; None: never
    split.
    """

    served: ServedWeights
    """The weights; they are zeros or random until they were loaded."""

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        used: tuple[Segment, ...],
    ) -> torch.Tensor:
        """Logits (n, vocabulary) after one token per row; its KV is written to `cache.column`, not
        yet advanced.
        """
        ...

    def verify(self, drafted: Drafted, cache: KVCache, used: tuple[Segment, ...]) -> torch.Tensor:
        """Logits (n, vocabulary) after each of these tokens; their KV is written from
        `cache.column` on, which is not advanced, and what lies there for a row with fewer tokens is
        finite.
        """
        ...

    def prefill(self, batch: Prefill) -> torch.Tensor:
        """KV of the new tokens: (2 · layers, m, heads, new, width)."""
        ...
