"""Checkpoint tensors as the fused decode path wants them, written in place.

Query, key and value projections are one matrix, gate and up another, all stored (in, out): at a few
rows these products are a third faster than with the checkpoint's (out, in). The weight of each norm
is multiplied into the matrix behind it, the scale of attention into the queries. Heads are ordered
by kv head: its queries, its key, its value, so that its queries can be multiplied with the cache
where they are. The dimensions of query and key heads are interleaved, which changes no score, so
that rotating by position is one complex product.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from producers.engines.torch_engine.fused_shape import FusedShape
from producers.engines.torch_engine.weights import check_tensors


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One block. `head_norm` is (queries_per_kv + 1, width): the norm of each query head of a kv
    head, then the key's.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedWeights:
    """All weights of one model; `load` changes them in place or, refused, not at all."""

    def __init__(self, shape: FusedShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*sizes: int) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        self.shape = shape
        s = shape
        out = (s.heads + 2 * s.kv_heads) * s.width
        self.embedding = empty(s.vocabulary, s.hidden)
        self.head = empty(s.vocabulary, s.hidden)
        self.layers = [
            FusedLayer(
                qkv=empty(s.hidden, out),
                qkv_bias=empty(out) if s.qkv_bias else None,
                head_norm=empty(s.queries_per_kv + 1, s.width) if s.head_norms else None,
                output=empty(s.heads * s.width, s.hidden),
                output_bias=empty(s.hidden) if s.output_bias else None,
                gate_up=empty(s.hidden, 2 * s.intermediate),
                down=empty(s.intermediate, s.hidden),
            )
            for _ in range(s.layers)
        ]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these weights; `EngineRefused` names the tensor that is wrong, and nothing has
        changed.
        """
        check_tensors(_expected(self.shape), tensors)
        self.embedding.copy_(tensors["model.embed_tokens.weight"])
        head = tensors["model.embed_tokens.weight" if self.shape.tied else "lm_head.weight"]
        self.head.copy_(_behind_norm(head, tensors["model.norm.weight"]))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            _fill(layer, own, self.shape)


def _fill(layer: FusedLayer, own: Mapping[str, torch.Tensor], shape: FusedShape) -> None:
    qkv = _fused_qkv(own, "weight", shape)
    layer.qkv.copy_(_behind_norm(qkv, own["input_layernorm.weight"]).t())
    if layer.qkv_bias is not None:
        layer.qkv_bias.copy_(_fused_qkv(own, "bias", shape))
    if layer.head_norm is not None:
        query_norm = _interleaved(own["self_attn.q_norm.weight"], shape.width)
        key_norm = _interleaved(own["self_attn.k_norm.weight"], shape.width)
        # The root of the width that the norm leaves out and the scale of attention cancel.
        layer.head_norm[:-1] = query_norm
        layer.head_norm[-1] = key_norm.float() * shape.width**0.5
    layer.output.copy_(own["self_attn.o_proj.weight"].t())
    if layer.output_bias is not None:
        layer.output_bias.copy_(own["self_attn.o_proj.bias"])
    gate_up = torch.cat((own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]))
    layer.gate_up.copy_(_behind_norm(gate_up, own["post_attention_layernorm.weight"]).t())
    layer.down.copy_(own["mlp.down_proj.weight"].t())


def _behind_norm(matrix: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """A matrix (out, in) that applies what the norm before it leaves out, in fp32."""
    return matrix.float() * norm.float() * norm.numel() ** 0.5


def _fused_qkv(own: Mapping[str, torch.Tensor], kind: str, shape: FusedShape) -> torch.Tensor:
    query, key, value = (own[f"self_attn.{part}_proj.{kind}"].float() for part in "qkv")
    if not shape.head_norms:
        query = query * shape.width**-0.5
    by_kv_head = (shape.kv_heads, -1, *query.shape[1:])
    parts = (_interleaved(query, shape.width), _interleaved(key, shape.width), value)
    return torch.cat([part.reshape(by_kv_head) for part in parts], 1).flatten(0, 1)


def _interleaved(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Dimension i of a head beside dimension i + width / 2, which it is rotated with."""
    halves = tensor.unflatten(0, (-1, 2, width // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _expected(shape: FusedShape) -> dict[str, tuple[int, ...]]:
    query, key = shape.heads * shape.width, shape.kv_heads * shape.width
    outputs = {"q": query, "k": key, "v": key}
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tied:
        expected["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        for part, size in outputs.items():
            expected[f"{attention}{part}_proj.weight"] = (size, shape.hidden)
            if shape.qkv_bias:
                expected[f"{attention}{part}_proj.bias"] = (size,)
        expected[f"{attention}o_proj.weight"] = (shape.hidden, query)
        if shape.output_bias:
            expected[f"{attention}o_proj.bias"] = (shape.hidden,)
        if shape.head_norms:
            expected[f"{attention}q_norm.weight"] = (shape.width,)
            expected[f"{attention}k_norm.weight"] = (shape.width,)
        expected[f"{prefix}input_layernorm.weight"] = (shape.hidden,)
        expected[f"{prefix}post_attention_layernorm.weight"] = (shape.hidden,)
        expected[f"{prefix}mlp.gate_proj.weight"] = (shape.intermediate, shape.hidden)
        expected[f"{prefix}mlp.up_proj.weight"] = (shape.intermediate, shape.hidden)
        expected[f"{prefix}mlp.down_proj.weight"] = (shape.hidden, shape.intermediate)
    return expected
