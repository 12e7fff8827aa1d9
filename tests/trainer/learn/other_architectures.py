"""Tiny models without a packed form of ours, with large random weights, trained through
transformers' forward.
"""

from typing import Any

import torch
import transformers

from tests.trainer.learning_reference import SHAPE, VOCABULARY

_SMALL: dict[str, Any] = {k: v for k, v in SHAPE.items() if k != "head_dim"}
_HEADS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}

PACKED = {
    "mistral_windowed": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, sliding_window=4)
    ),
    "gemma2_capped": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SHAPE, sliding_window=5, query_pre_attn_scalar=8, final_logit_softcapping=3.0
        )
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SHAPE, sliding_window=5, query_pre_attn_scalar=8)
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **_HEADS, num_attention_heads=4, intermediate_size=48, max_position_embeddings=128
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128
        )
    ),
    "cohere_scaled": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**_SMALL, logit_scale=0.3)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_SMALL, num_local_experts=4)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)),
}
"""Sequences may share a row of their forward."""
PADDED = {
    "bloom_alibi": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **_HEADS,
            num_attention_heads=4,
            ffn_dim=48,
            word_embed_proj_dim=16,
            max_position_embeddings=128,
        )
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4
        )
    ),
}
"""Sequences may not share a row: positions are ignored, the mask gets none, or a state is carried
on.
"""
OTHERS = PACKED | PADDED


def build_other(name: str) -> transformers.PreTrainedModel:
    """The same fp32 weights at each call, large enough that distributions are far from uniform."""
    torch.manual_seed(7)
    model = OTHERS[name]().float().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model
