"""The Llama and Qwen families, over fused weights: with few rows and a small model a call's
overhead is as large as its arithmetic.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from rollstream.producers.engines.queue import EngineWeights
from rollstream.producers.engines.torch import attention
from rollstream.producers.engines.torch.adapters import (
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    AdapterRoutes,
    ServedAdapters,
)
from rollstream.producers.engines.torch.decoder import DraftedTokens, PrefillBatch
from rollstream.producers.engines.torch.llama_weights import (
    FusedLayer,
    FusedShape,
    FusedWeights,
    expected_shapes,
    rotations,
)
from rollstream.producers.engines.torch.rows import RowSegment
from rollstream.producers.engines.torch.weights import ServedWeights


class FusedDecoder:
    """Implements `Decoder` for a configuration that `fused_shape` accepts."""

    def __init__(
        self,
        shape: FusedShape,
        config: PreTrainedConfig,
        context_max: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.vocabulary = shape.vocabulary
        self.kv = attention.KVShape(shape.layers, shape.kv_heads, shape.width)
        # The cost of one more attention call, in row-tokens: cached tokens read for one row.
        # Measured on a CPU: about 17 µs for a call, 27 ns for a row-token. On CUDA a launch costs
        # as much as far more row-tokens.
        self.segment_overhead_tokens: int | None = 600 if device.type == "cpu" else 50_000
        self.weights = FusedWeights(shape, dtype, device)
        self.served = ServedWeights(self.weights.views, expected_shapes(shape))
        self.adapters: ServedAdapters | None = None
        self._floor = torch.tensor((shape.hidden * shape.epsilon) ** 0.5, device=device)
        self._head_floor = torch.tensor((shape.width * shape.epsilon) ** 0.5, device=device)
        self.rotations = rotations(config, shape.width, context_max + 1).to(device)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> EngineWeights:
        """Serve these weights; adapters over them can be served from then on. Returns the object by
        which the engine loads later versions.
        """
        self.served.fill(tensors)
        norms = {name: tensors[name].clone() for name in tensors if "layernorm" in name}
        self.adapters = ServedAdapters(self.shape, norms, self.dtype, self.device)
        return self.served

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: attention.KVCache,
        used: tuple[RowSegment, ...],
        routes: AdapterRoutes | None = None,
    ) -> torch.Tensor:
        s, rows = self.shape, ids.shape[0]
        hidden = self.weights.embedding.index_select(0, ids)
        rotation = self.rotations.index_select(0, positions)[:, None, None]
        masks = attention.segment_masks(cache, used)
        for index, layer in enumerate(self.weights.layers):
            terms = LayerTerms(index, routes)
            heads = self._heads(layer, hidden, rotation, terms)
            cache.newest(index, rows).copy_(heads[:, :, s.queries_per_kv :])
            attended = attention.attend(heads[:, :, : s.queries_per_kv], index, cache, used, masks)
            self._add_outputs(layer, hidden, attended, terms)
        return self._logits(hidden)

    def verify(
        self, drafted: DraftedTokens, cache: attention.KVCache, used: tuple[RowSegment, ...]
    ) -> torch.Tensor:
        s, rows, ahead, slots = self.shape, drafted.rows, drafted.ahead, drafted.slots
        hidden = self.weights.embedding.index_select(0, drafted.ids)
        rotation = self.rotations.index_select(0, drafted.positions)[:, None, None]
        masks = attention.masks_ahead(cache, used, ahead, s.queries_per_kv)
        # Matrix products run over the tokens, attention over padded rows.
        size = (rows * ahead, s.kv_heads, s.queries_per_kv + 2, s.width)
        padded = None if slots is None else hidden.new_zeros(size)
        for index, layer in enumerate(self.weights.layers):
            terms = LayerTerms(index, drafted.routes)
            heads = self._heads(layer, hidden, rotation, terms)
            if padded is not None and slots is not None:
                heads = padded.index_copy_(0, slots, heads)
            heads = heads.view(rows, ahead, s.kv_heads, s.queries_per_kv + 2, s.width)
            cache.coming(index, rows, ahead).copy_(heads[:, :, :, s.queries_per_kv :])
            queries = heads[:, :, :, : s.queries_per_kv]
            attended = attention.attend_ahead(queries, index, cache, used, masks)
            if slots is not None:
                attended = attended.index_select(0, slots)
            self._add_outputs(layer, hidden, attended, terms)
        return self._logits(hidden)

    def prefill(self, batch: PrefillBatch) -> torch.Tensor:
        s = self.shape
        rows, new = batch.ids.shape
        hidden = self.weights.embedding[batch.ids.flatten()]
        rotation = self.rotations[batch.positions.flatten()][:, None, None]
        out = hidden.new_empty(2 * s.layers, rows, s.kv_heads, new, s.width)
        for index, layer in enumerate(self.weights.layers):
            terms = LayerTerms(index, batch.routes)
            heads = self._heads(layer, hidden, rotation, terms).unflatten(0, (rows, new))
            # To (queries, key, value; rows; kv heads; new; width).
            heads = heads.permute(3, 0, 2, 1, 4)
            out[2 * index : 2 * index + 2] = heads[-2:]
            if index == s.layers - 1:
                break  # only keys and values are returned: no pass needs this layer's output
            keys, values = out[2 * index], out[2 * index + 1]
            if batch.past is not None:
                keys = torch.cat((batch.past[2 * index], keys), 2)
                values = torch.cat((batch.past[2 * index + 1], values), 2)
            queries = heads[:-2].permute(1, 2, 0, 3, 4).flatten(1, 2)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, batch.mask, scale=1.0, enable_gqa=s.queries_per_kv > 1
            )
            attended = attended.transpose(1, 2).reshape(rows * new, -1)
            self._add_outputs(layer, hidden, attended, terms)
        return out

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # In fp32 whatever dtype the layers compute in, as in the trainer.
        return F.linear(_unit(hidden.float(), self._floor), self.weights.head)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        # The weight of the norm and the root of the width are multiplied into the next matrix.
        return _unit(hidden, self._floor)

    def _heads(
        self,
        layer: FusedLayer,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        terms: "LayerTerms",
    ) -> torch.Tensor:
        s = self.shape
        normed = self._norm(hidden)
        if layer.qkv_bias is None:
            projected = torch.mm(normed, layer.qkv)
        else:
            projected = torch.addmm(layer.qkv_bias, normed, layer.qkv)
        terms.add(projected, normed, QKV)
        # Queries, key and value of each kv head; queries and key are rotated below.
        heads = projected.view(-1, s.kv_heads, s.queries_per_kv + 2, s.width)
        rotated = heads[:, :, :-1]
        if layer.head_norm is not None:
            torch.mul(_unit(rotated, self._head_floor), layer.head_norm, out=rotated)
        if self.dtype == torch.float32:
            torch.view_as_complex(rotated.unflatten(3, (-1, 2))).mul_(rotation)
        else:
            pairs = torch.view_as_complex(rotated.float().unflatten(3, (-1, 2)))
            rotated.copy_(torch.view_as_real(pairs * rotation).flatten(3))
        return heads

    def _add_outputs(
        self,
        layer: FusedLayer,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        terms: "LayerTerms",
    ) -> None:
        # In place: residuals are added inside the matrix products.
        hidden.addmm_(attended, layer.output)
        terms.add(hidden, attended, OUTPUT)
        if layer.output_bias is not None:
            hidden.add_(layer.output_bias)
        normed = self._norm(hidden)
        gate_up = torch.mm(normed, layer.gate_up)
        terms.add(gate_up, normed, GATE_UP)
        gate, up = gate_up.chunk(2, 1)
        inner = F.silu(gate).mul_(up)
        hidden.addmm_(inner, layer.down)
        terms.add(hidden, inner, DOWN)


@dataclass(frozen=True, slots=True)
class LayerTerms:
    layer: int
    routes: AdapterRoutes | None

    def add(self, out: torch.Tensor, x: torch.Tensor, product: int) -> None:
        if self.routes is not None:
            self.routes.add(out, x, self.layer, product)


def _unit(values: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    # Three calls where `rms_norm` makes nine on a CPU.
    exact = values.float()
    length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    return (exact / length.hypot_(floor)).to(values.dtype)
