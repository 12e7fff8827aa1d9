"""The forward pass of Llama, Qwen2 and Qwen3 in float32 over sequences that are packed without
padding (`PackedDecoder`). Its scores are those of transformers' forward up to rounding, in less
time (docs/explanation/learning.md, Forward passes).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from rollstream.consumers.trainer.learn.fused_ops import (
    attend,
    normalise,
    recompute,
    rotate,
    swiglu,
)
from rollstream.consumers.trainer.learn.row_layout import TokenRows
from rollstream.consumers.trainer.learn.scores import TokenScores, allowed_of, score_hidden
from rollstream.storage.model_folder.lora import HIGH, LOW, attached_adapter

STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # frequencies do not depend on the batch


def has_packed_form(model: PreTrainedModel) -> bool:
    """Whether it is one of the three classes, with full attention in all layers, SiLU and static
    rotary positions (RoPE).
    """
    config: Any = model.config
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
        return False
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        set(layer_types) == {"full_attention"}
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in STATIC_ROPE
    )


class PackedDecoder:
    """Scores under the model's parameters at the time of the call, LoRA adapters included. With
    `recomputes` a layer keeps only its input for the backward pass; with `keeps_states` the scores
    have their `states`.

    Faster than padded batches under autograd: no padding; gains of norms are multiplied into the
    matrices that follow (d × d work, not N × d); one complex product rotates a rotary pair
    (`_interleaved`); `fused_ops` has backward passes written by hand; the end of the last layer and
    the head are computed for trained positions alone.
    """

    def __init__(
        self, model: PreTrainedModel, recomputes: bool = False, keeps_states: bool = False
    ) -> None:
        config: Any = model.config
        self._recomputes, self._keeps_states = recomputes, keeps_states
        self._named = dict(model.named_parameters())
        adapter = attached_adapter(model)
        self._scaling = 0.0 if adapter is None else adapter.scaling
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_size: int = model.model.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._parameters = [
            [p for name, p in self._named.items() if name.startswith(f"model.layers.{number}.")]
            for number in range(self._layers)
        ]
        self._rope = model.model.rotary_emb
        tied = "lm_head.weight" not in self._named
        self._head = "model.embed_tokens.weight" if tied else "lm_head.weight"

    def score(self, rows: TokenRows) -> TokenScores:
        gain = self._named["model.norm.weight"]
        hidden = self._normed(rows)
        head = self._named[self._head] * gain
        allowed = allowed_of(rows.allowed, rows.allowed_row)
        scores = score_hidden(hidden, head, rows.targets, rows.temperature, allowed)
        return scores._replace(states=hidden * gain) if self._keeps_states else scores

    def states(self, rows: TokenRows) -> Tensor:
        """Returns the states [G, d], before each trained token; differentiable."""
        return self._normed(rows) * self._named["model.norm.weight"]

    def _normed(self, rows: TokenRows) -> Tensor:
        tensors = self._named
        rotations = self._rotations(rows.positions)
        x = F.embedding(rows.tokens, tensors["model.embed_tokens.weight"])
        for number in range(self._layers):
            layer = partial(self._layer, number, rotations, rows)
            if self._recomputes and torch.is_grad_enabled():
                x = recompute(layer, x, self._parameters[number])
            else:
                x = layer(x)
        return normalise(x, self._eps)

    def _layer(self, number: int, rotations: Tensor, rows: TokenRows, x: Tensor) -> Tensor:
        at = f"model.layers.{number}."
        attended = self._attended(x, at, rotations, rows)
        if number == self._layers - 1:  # no later layer attends to the other rows
            x, attended = (part.index_select(0, rows.scored) for part in (x, attended))
        x = self._added(x, attended, at + "self_attn.o_proj")
        return self._mlp(x, at)

    def _attended(self, x: Tensor, layer: str, rotations: Tensor, rows: TokenRows) -> Tensor:
        tensors, at = self._named, layer + "self_attn."
        normed = normalise(x, self._eps)
        gain = tensors[layer + "input_layernorm.weight"]
        weight = torch.cat(
            [
                self._interleaved(tensors[at + "q_proj.weight"]),
                self._interleaved(tensors[at + "k_proj.weight"]),
            ]
        )
        query_key = F.linear(normed, weight * gain, self._query_key_bias(at))
        names = at + "q_proj", at + "k_proj"
        query_key = self._with_adapter(query_key, normed, names, gain, self._interleaved)
        query_key = query_key.unflatten(-1, (-1, self._head_size))
        if at + "q_norm.weight" in tensors:
            query_key = normalise(query_key, self._eps) * self._head_gains(at)
        query_key = rotate(query_key, rotations)
        value_weight = tensors[at + "v_proj.weight"] * gain
        value = F.linear(normed, value_weight, tensors.get(at + "v_proj.bias"))
        value = self._with_adapter(value, normed, (at + "v_proj",), gain)
        value = value.unflatten(-1, (-1, self._head_size))
        return attend(query_key, value, self._heads, rows.blocks).flatten(1)

    def _mlp(self, x: Tensor, layer: str) -> Tensor:
        tensors, at = self._named, layer + "mlp."
        normed = normalise(x, self._eps)
        gain = tensors[layer + "post_attention_layernorm.weight"]
        weight = torch.cat([tensors[at + "gate_proj.weight"], tensors[at + "up_proj.weight"]])
        bias = None
        if at + "gate_proj.bias" in tensors:
            bias = torch.cat([tensors[at + "gate_proj.bias"], tensors[at + "up_proj.bias"]])
        gate_up = F.linear(normed, weight * gain, bias)
        gate_up = self._with_adapter(gate_up, normed, (at + "gate_proj", at + "up_proj"), gain)
        return self._added(x, swiglu(gate_up), at + "down_proj")

    def _added(self, x: Tensor, branch: Tensor, name: str) -> Tensor:
        # One operation multiplies and adds.
        out = torch.addmm(x, branch, self._named[name + ".weight"].t())
        out = self._with_adapter(out, branch, (name,))
        bias = self._named.get(name + ".bias")
        return out if bias is None else out + bias

    def _with_adapter(
        self,
        out: Tensor,
        x: Tensor,
        names: Sequence[str],
        gain: Tensor | None = None,
        reordered: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Tensor:
        """`out` [N, all outputs] plus s · B·A·(x · gain) of the adapters of these layers (s = alpha
        / rank), side by side; `reordered` orders the rows of B like those of the layer's matrix.
        """
        tensors = self._named
        lows: list[Tensor] = []
        highs: list[Tensor] = []
        for name in names:
            low, high = tensors.get(name + LOW), tensors.get(name + HIGH)
            if low is not None and high is not None:
                lows.append(low)
                highs.append(reordered(high))
            else:  # a layer without an adapter
                highs.append(x.new_zeros(tensors[name + ".weight"].shape[0], 0))
        if not lows:
            return out
        low = torch.cat(lows)
        low = low if gain is None else low * gain
        inner = F.linear(x, low) * self._scaling
        return torch.addmm(out, inner, torch.block_diag(*highs).t())

    def _interleaved(self, weight: Tensor) -> Tensor:
        # Rows of each head in the order 0, D/2, 1, D/2 + 1, …, so that the halves of a rotary pair
        # are neighbours. Scores stay: queries and keys are permuted alike.
        return weight.unflatten(0, (-1, 2, self._head_size // 2)).transpose(1, 2).flatten(0, 2)

    def _query_key_bias(self, at: str) -> Tensor | None:
        if at + "q_proj.bias" not in self._named:
            return None
        biases = self._named[at + "q_proj.bias"], self._named[at + "k_proj.bias"]
        return torch.cat([self._interleaved(bias) for bias in biases])

    def _head_gains(self, at: str) -> Tensor:
        query, key = (self._interleaved(self._named[at + n + "_norm.weight"]) for n in "qk")
        return torch.cat([query.expand(self._heads, -1), key.expand(self._kv_heads, -1)])

    def _rotations(self, positions: Tensor) -> Tensor:
        """Returns rotations [N, heads + kv heads, D/2] as complex numbers, by the model's own
        table.
        """
        length = int(positions.max()) + 1
        with torch.no_grad():
            steps = torch.arange(length, device=positions.device)[None]
            cos, sin = self._rope(self._named[self._head], steps)
        half = self._head_size // 2
        table = torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        rotations = table.index_select(0, positions)[:, None]
        return rotations.expand(-1, self._heads + self._kv_heads, -1).contiguous()
