"""Models and prompts of the benchmarks that use vLLM, all with random weights."""

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollstream.streams.values import Tokens, Version

V1, V2 = Version(1, 1), Version(2, 1)
CONTEXT, PROMPT_TOKENS, VOCABULARY = 512, 32, 4096


def small_model(seed: int) -> PreTrainedModel:
    """Qwen3 of 7.4 M parameters."""
    return _drawn(_config(VOCABULARY, 256, 8, 768, tied=True), seed)


def large_model(seed: int) -> PreTrainedModel:
    """Qwen3 of 100 M parameters. Its head is not tied to the embedding: vLLM's reload on the CPU
    leaves the packed copy of a tied head at the old weights, so it would do less than is needed.
    """
    return _drawn(_config(16_000, 768, 12, 2048, tied=False), seed)


def prompt_of(index: int) -> Tokens:
    draw = np.random.default_rng(index)
    return draw.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.uint32)


def _config(vocabulary: int, hidden: int, layers: int, inner: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=CONTEXT,
    )


def _drawn(config: Qwen3Config, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        model = Qwen3ForCausalLM(config).eval()
    return model.requires_grad_(False)
