"""Fused weights: matrices with a common input are one, and norms and scales are multiplied into the
matrices after them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeArgument=false
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollstream.producers.engines.torch.weights import WeightView

FAMILIES = ("llama", "qwen2", "qwen3")  # values of `model_type`
ROPES = ("default", "linear", "llama3")
"""Types of rotary position embedding whose frequencies depend on the configuration alone."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    """Each of the `kv_heads` serves `queries_per_kv` query heads; a head has `width` dimensions.
    `tied`: one tensor is both embedding and output matrix (head). `head_norms`: the queries and the
    keys of each head are normalised (Qwen 3).
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_heads: int
    queries_per_kv: int
    width: int
    epsilon: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    head_norms: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.queries_per_kv


def fused_shape(config: PreTrainedConfig) -> FusedShape | str:
    """Returns the model's shape, or the reason why the fused path cannot serve it."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPES:
        return f"rope type {rope['rope_type']!r} is not one of {', '.join(ROPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial_rotary_factor is not 1"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    if getattr(config, "mlp_bias", False):
        return "mlp_bias is set"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    bias = bool(getattr(config, "attention_bias", False))
    return FusedShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        kv_heads=kv_heads,
        queries_per_kv=heads // kv_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        epsilon=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias or config.model_type == "qwen2",
        output_bias=bias and config.model_type != "qwen2",
        head_norms=config.model_type == "qwen3",
    )


def rotations(config: PreTrainedConfig, width: int, positions: int) -> torch.Tensor:
    """Returns the rotary position embedding, complex64 of shape (positions, width / 2)."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        frequencies, scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(positions, dtype=torch.float)[:, None] * frequencies
    return torch.polar(torch.full_like(angles, scaling), angles)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """`head_norm`, of shape (queries_per_kv + 1, width), holds the weights of the head norms: for
    the equal query heads of one kv head, and in its last row for the key.
    """

    # Matrices are (inputs, outputs): for few sequences their products are a third faster than with
    # the checkpoint's (outputs, inputs).
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedWeights:
    """The served memory, filled with zeros; `views` has, by checkpoint name, the parts that each
    tensor fills. Every norm's weight but a head norm's is multiplied into the matrix after it, so
    it has no view of its own.
    """

    def __init__(self, shape: FusedShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=kind, device=device)

        self.shape = shape
        s = shape
        out = (s.heads + 2 * s.kv_heads) * s.width
        self.embedding = empty(s.vocabulary, s.hidden)
        # The output matrix is fp32 whatever the dtype of the layers: if it were rounded, that would
        # cause most of the difference between the engine's and the trainer's log-probabilities.
        self.head = empty(s.vocabulary, s.hidden, kind=torch.float32)
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

        self.views: dict[str, tuple[WeightView, ...]] = self._embedding_views()
        for index, layer in enumerate(self.layers):
            self.views.update(_layer_views(layer, s, f"model.layers.{index}."))

    def _embedding_views(self) -> dict[str, tuple[WeightView, ...]]:
        embedding = WeightView(self.embedding)
        head = WeightView(self.head, norm="model.norm.weight")
        if self.shape.tied:
            return {"model.embed_tokens.weight": (embedding, head)}
        return {"model.embed_tokens.weight": (embedding,), "lm_head.weight": (head,)}


def _layer_views(
    layer: FusedLayer, shape: FusedShape, prefix: str
) -> dict[str, tuple[WeightView, ...]]:
    attention, mlp, middle = f"{prefix}self_attn.", f"{prefix}mlp.", shape.intermediate
    in_norm, post_norm = (
        f"{prefix}input_layernorm.weight",
        f"{prefix}post_attention_layernorm.weight",
    )
    gate, up = layer.gate_up.t().split(middle)
    views: dict[str, tuple[WeightView, ...]] = {
        f"{attention}o_proj.weight": (WeightView(layer.output.t()),),
        f"{mlp}gate_proj.weight": (WeightView(gate, norm=post_norm),),
        f"{mlp}up_proj.weight": (WeightView(up, norm=post_norm),),
        f"{mlp}down_proj.weight": (WeightView(layer.down.t()),),
    }
    scale = attention_scale(shape)
    for kind, served in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if served is None:
            continue
        norm = in_norm if kind == "weight" else None
        query, key, value = head_views(served, shape)
        views[f"{attention}q_proj.{kind}"] = (WeightView(query, scale, norm),)
        views[f"{attention}k_proj.{kind}"] = (WeightView(key, None, norm),)
        views[f"{attention}v_proj.{kind}"] = (WeightView(value, None, norm),)
    if layer.output_bias is not None:
        views[f"{attention}o_proj.bias"] = (WeightView(layer.output_bias),)
    if layer.head_norm is not None:
        *queries, key = (_interleaved(row) for row in layer.head_norm)
        views[f"{attention}q_norm.weight"] = tuple(WeightView(query) for query in queries)
        # An RMS norm scales a head to the length √width; the decode path scales it to length 1.
        # For queries the missing √width cancels against the scale of attention, 1 / √width; for
        # keys it is multiplied into the weight of the norm here.
        views[f"{attention}k_norm.weight"] = (WeightView(key, shape.width**0.5),)
    return views


def attention_scale(shape: FusedShape) -> float | None:
    """Returns 1 / √width, for the projection to queries; None with head norms (`_layer_views`)."""
    return None if shape.head_norms else shape.width**-0.5


def head_views(served: torch.Tensor, shape: FusedShape) -> tuple[torch.Tensor, ...]:
    """Returns views of the queries, keys and values, with the outputs as first dimensions, in
    checkpoint order.
    """
    # In memory, for each kv head its queries, its key, its value: products of queries with the KV
    # cache need no copy.
    by_head = served.unflatten(-1, (shape.kv_heads, shape.queries_per_kv + 2, shape.width))
    by_head = by_head.movedim((-3, -2, -1), (0, 1, 2))
    query, key, value = by_head.tensor_split((shape.queries_per_kv, shape.queries_per_kv + 1), 1)
    return _interleaved(query, 2), _interleaved(key, 2), value


def _interleaved(served: torch.Tensor, dimension: int = 0) -> torch.Tensor:
    # In memory dimension i + width / 2 follows dimension i: the two are rotated as a pair, so the
    # rotation is one complex product. Queries and keys have the same order, so attention scores do
    # not change.
    return served.unflatten(dimension, (-1, 2)).transpose(dimension, dimension + 1)


def expected_shapes(shape: FusedShape) -> dict[str, tuple[int, ...]]:
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
