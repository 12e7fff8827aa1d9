"""The KV cache of one vLLM engine as bytes of whole blocks, and back.

vLLM shows each layer's cache as [block, head, token, channel]; what lies inside of a block is its
attention's business and the same on both sides where `layout` is. A cache of another shape, or of
several groups (sliding windows, states), is not handed over.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from storage.tensors import DTYPE_NAMES, tensor_bytes, tensor_of


@dataclass(frozen=True, slots=True)
class Caches:
    """One tensor per layer, blocks of `block` tokens."""

    tensors: tuple[torch.Tensor, ...]
    block: int
    layout: str

    @property
    def block_bytes(self) -> int:
        """Of one block of all layers."""
        return sum(cache[0].numel() * cache.element_size() for cache in self.tensors)

    def read(self, blocks: Sequence[int]) -> list[memoryview]:
        """Their bytes, layer by layer; a copy."""
        return [tensor_bytes(cache[self._index(cache, blocks)]) for cache in self.tensors]

    def write(self, body: NDArray[np.uint8], first: int, blocks: Sequence[int]) -> None:
        """Those of the body from its block `first` on, into these."""
        count = len(body) // self.block_bytes
        begin = 0
        for cache in self.tensors:
            size = count * cache[0].numel() * cache.element_size()
            shape = (count, *cache.shape[1:])
            whole = tensor_of(body[begin : begin + size].data, DTYPE_NAMES[cache.dtype], shape)
            part = whole[first : first + len(blocks)].to(cache.device)
            cache[self._index(cache, blocks)] = part
            begin += size

    def _index(self, cache: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=cache.device)


def caches_of(vllm_config: Any, kv_cache_config: Any, release: str) -> Caches | None:
    """Those of an engine whose worker is in this process; None where they are not as above."""
    from producers.engines.vllm_engine.release import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return None
    layers = vllm_config.compilation_config.static_forward_context
    block, blocks = int(groups[0].kv_cache_spec.block_size), int(kv_cache_config.num_blocks)
    tensors: list[torch.Tensor] = []
    described: list[tuple[str, list[int], str, str, str]] = []
    for name in sorted(groups[0].layer_names):
        layer = layers.get(name)
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or cache.ndim != 4:
            return None
        if cache.shape[0] != blocks or cache.shape[2] != block or cache.dtype not in DTYPE_NAMES:
            return None
        tensors.append(cache)
        kernel = f"{type(getattr(layer, 'impl', None)).__name__}/{getattr(layer, 'isa', '')}"
        described.append((name, list(cache.shape[1:]), str(cache.dtype), kernel, cache.device.type))
    if len({cache.data_ptr() for cache in tensors}) != len(tensors):  # shared by layers
        return None
    return Caches(tuple(tensors), block, json.dumps([release, block, described]))
