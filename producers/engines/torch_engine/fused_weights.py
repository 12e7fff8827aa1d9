"""Checkpoint tensors as the fused decode path wants them, written in place.

Query, key and value projections are one matrix, gate and up another, all stored (in, out): at a few rows these
products are a third faster than with the checkpoint's (out, in). Two reorderings change no result: the dimensions of
query and key heads are interleaved, so that rotating by position is one complex product, and the input of the output
projection is ordered (query of the group, kv head, width), as attention over grouped heads leaves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from producers.engines.torch_engine.fused_shape import FusedShape
from producers.engines.torch_engine.weights import check_tensors


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One block. `head_norm` is (heads + kv_heads, width): the query norm per query head, then the key norm."""

    norm_1: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    norm_2: torch.Tensor
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
        self.head = self.embedding if s.tied else empty(s.vocabulary, s.hidden)
        self.norm = empty(s.hidden)
        self.layers = [
            FusedLayer(
                norm_1=empty(s.hidden),
                qkv=empty(s.hidden, out),
                qkv_bias=empty(out) if s.qkv_bias else None,
                head_norm=empty(s.heads + s.kv_heads, s.width) if s.head_norms else None,
                output=empty(s.heads * s.width, s.hidden),
                output_bias=empty(s.hidden) if s.output_bias else None,
                norm_2=empty(s.hidden),
                gate_up=empty(s.hidden, 2 * s.intermediate),
                down=empty(s.intermediate, s.hidden),
            )
            for _ in range(s.layers)
        ]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these weights; `EngineRefused` names the tensor that is wrong, and nothing has changed."""
        check_tensors(_expected(self.shape), tensors)
        self.embedding.copy_(tensors["model.embed_tokens.weight"])
        self.norm.copy_(tensors["model.norm.weight"])
        if not self.shape.tied:
            self.head.copy_(tensors["lm_head.weight"])
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            _fill(layer, own, self.shape)


def _fill(layer: FusedLayer, own: Mapping[str, torch.Tensor], shape: FusedShape) -> None:
    layer.norm_1.copy_(own["input_layernorm.weight"])
    layer.norm_2.copy_(own["post_attention_layernorm.weight"])
    layer.qkv.copy_(_fused_qkv(own, "weight", shape).t())
    if layer.qkv_bias is not None:
        layer.qkv_bias.copy_(_fused_qkv(own, "bias", shape))
    if layer.head_norm is not None:
        layer.head_norm[: shape.heads] = _interleaved(own["self_attn.q_norm.weight"], shape.width)
        layer.head_norm[shape.heads :] = _interleaved(own["self_attn.k_norm.weight"], shape.width)
    by_head = own["self_attn.o_proj.weight"].unflatten(
        1, (shape.kv_heads, shape.queries_per_kv, shape.width)
    )
    layer.output.copy_(by_head.permute(2, 1, 3, 0).flatten(0, 2))
    if layer.output_bias is not None:
        layer.output_bias.copy_(own["self_attn.o_proj.bias"])
    gate, up = own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]
    layer.gate_up.copy_(torch.cat((gate, up)).t())
    layer.down.copy_(own["mlp.down_proj.weight"].t())


def _fused_qkv(own: Mapping[str, torch.Tensor], kind: str, shape: FusedShape) -> torch.Tensor:
    query, key, value = (own[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
    return torch.cat((_interleaved(query, shape.width), _interleaved(key, shape.width), value))


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
