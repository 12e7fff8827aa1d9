"""Tiny models whose heads vLLM's CPU kernels take, and engines of them."""

from functools import partial

import torch
from engine_samples import SIZES, V1
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from producers.engines.vllm_engine import VllmEngine
from producers.settings import VllmSettings

WIDE = SIZES | {"hidden_size": 128}  # 4 heads of 32
FAMILIES = {
    "llama": partial(LlamaConfig, **WIDE, tie_word_embeddings=False),
    "qwen2": partial(Qwen2Config, **WIDE, tie_word_embeddings=True),
    "qwen3": partial(Qwen3Config, **SIZES, head_dim=32, tie_word_embeddings=True),
}
CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}


def vllm_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Random weights, all of them, large enough for peaked distributions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLASSES[family](FAMILIES[family]()).eval().requires_grad_(False)
        model.generation_config.eos_token_id = None
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.05))
    return model


def open_vllm(
    model: PreTrainedModel, slots: int = 4, context_max: int = 96, emit_every: int = 64
) -> VllmEngine:
    """In this process, so stepped by hand."""
    state, sizes = model.state_dict(), (slots, context_max, emit_every)
    return VllmEngine(model.config, state, V1, *sizes, settings=VllmSettings(process=False))
