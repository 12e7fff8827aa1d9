"""A model that cannot be served is refused by name at opening, never later."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    CLIPTextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.streams.values import Sampling
from tests.support.engine_samples import SIZES, V1, ask, prompt, tiny_model

SMALL: dict[str, Any] = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 1}
REFUSED = [
    (T5Config(), "encoder-decoder"),
    (BartConfig(), "encoder-decoder"),
    (CLIPTextConfig(), "no causal language model"),
    (MambaConfig(**SMALL), "linear_attention"),
    (BloomConfig(vocab_size=19, hidden_size=32, n_layer=1, n_head=2), "BloomConfig"),
    (MistralConfig(**SIZES, sliding_window=32), "sliding window of 32"),
    (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1), "8"),
    (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4,
                                           "factor": 2.0}), "dynamic"),
    (BertConfig(**SMALL | {"num_hidden_layers": 2}, num_attention_heads=2, intermediate_size=32,  # pyright: ignore[reportArgumentType]
                is_decoder=False), "later tokens"),
    (tiny_model("gpt2").config.__class__(vocab_size=19, n_embd=32, n_layer=1, n_head=2,  # pyright: ignore[reportCallIssue]
                                         n_positions=64), "64 positions"),  # pyright: ignore[reportCallIssue]
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "named"), REFUSED, ids=[type(config).__name__ for config, _ in REFUSED]
)
def test_a_model_that_cannot_be_served_is_refused_by_name(
    config: PreTrainedConfig, named: str
) -> None:
    tensors = {}
    if not config.is_encoder_decoder and "CLIP" not in type(config).__name__:
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    with pytest.raises(EngineRefused, match=named):
        TorchEngine(config, tensors, V1, EngineOptions(2, 96))


def test_a_sliding_window_that_holds_the_context_is_served() -> None:
    config = MistralConfig(**SIZES, sliding_window=96)
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    engine = TorchEngine(config, tensors, V1, EngineOptions(2, 96))
    engine.submit(ask("t", prompt(4), Sampling(tokens_max=5)))
    assert len(engine.poll(10.0)[0].tokens) == 5


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_of_experts_is_served(seed: int) -> None:
    """The experts that the last token uses decide how sums of other tokens are rounded; in about
    half of such models the logits before it differ in the last bit.
    """
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = MixtralConfig(**SIZES, num_local_experts=4 + seed)
    model = AutoModelForCausalLM.from_config(config).float()
    TorchEngine(config, model.state_dict(), V1, EngineOptions(2, 96))


@pytest.mark.parametrize("name", ["paced", "tensorrt"])
def test_an_unknown_engine_is_a_configuration_error(name: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigurationError, match=name):
        open_engine(
            name, model.config, model.state_dict(), V1, EngineOptions(slots=2, context_max=64)
        )
