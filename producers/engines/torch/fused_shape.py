"""Which Llama- and Qwen-family configurations the fused decode path serves, and their sizes.

For any other configuration `fused_shape` returns the reason as text, and the model runs through
transformers' forward.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeArgument=false

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = ("llama", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")  # their frequencies depend on the configuration alone


@dataclass(frozen=True, slots=True)
class FusedShape:
    """Sizes and switches of one model. Query heads are `kv_heads` × `queries_per_kv`."""

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
    """Sizes of a model that the fused path serves, or why it does not."""
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
    """(positions, width / 2) complex64: the factor of each pair of dimensions at each position."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        frequencies, scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(positions, dtype=torch.float)[:, None] * frequencies
    return torch.polar(torch.full_like(angles, scaling), angles)
