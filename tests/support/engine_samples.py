"""Tiny random models, requests and engines' outputs; plain forwards to compare with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollstream.producers.engines.base import Emission, Engine, GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.token_arrays import DTYPES
from rollstream.streams.values import Sampling, Span, Tokens, Version
from testbed.waiting import WAIT_S

V1, V2 = Version(1, 1), Version(2, 1)
VOCABULARY = 19
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "llama3_rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            word_embed_proj_dim=32,
        )
    ),
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Random values for all weights."""
    return random_model(FAMILIES[family], seed)


def random_model(make: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """Its weights (norms and biases too) drawn large enough for peaked distributions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval().requires_grad_(False)
        model.generation_config.eos_token_id = None
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.05))
    return model


def open_torch(
    model: PreTrainedModel, slots: int = 4, context_max: int = 96, emit_every: int = 64
) -> TorchEngine:
    return TorchEngine(
        model.config, model.state_dict(), V1, EngineOptions(slots, context_max, emit_every)
    )


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.uint32)


def ask(
    trajectory: str, tokens: Tokens, sampling: Sampling, *, group: int = 0, hold: bool = False
) -> GenerationRequest:
    nothing = np.zeros(0, np.float32)
    sources = np.full(len(tokens), PROMPT, np.uint8)
    return GenerationRequest(trajectory, group, tokens, sources, sampling, 7, nothing, (), hold)


@dataclass(slots=True)
class Gained:
    """A trajectory's generated tokens, joined over its emissions."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[Version, int]] = field(default_factory=list)
    finish: str | None = None
    arrays: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, emission: Emission) -> None:
        assert self.finish in (None, "stop")
        assert len(emission.tokens) == len(emission.logprobs)
        for name, rows in emission.arrays.items():
            assert len(rows) >= len(emission.tokens), f"{name}: a new token without its row"
            kinds = {(row.dtype, row.shape) for row in (*self.arrays.setdefault(name, []), *rows)}
            assert len(kinds) <= 1, f"{name} has rows of several types"
            assert {dtype.name for dtype, _ in kinds} <= set(DTYPES)
            self.arrays[name] += list(rows)
        self.tokens += emission.tokens.tolist()
        self.logprobs += emission.logprobs.tolist()
        if self.spans and self.spans[-1][0] == emission.version:
            self.spans[-1] = (emission.version, self.spans[-1][1] + len(emission.tokens))
        else:
            self.spans.append((emission.version, len(emission.tokens)))
        self.finish = emission.finish


def gather(gained: dict[str, Gained], emissions: Iterable[Emission]) -> None:
    for emission in emissions:
        gained.setdefault(emission.trajectory, Gained()).add(emission)


def run_all(
    engine: Engine, requests: Iterable[GenerationRequest] = (), wait_s: float = WAIT_S
) -> dict[str, Gained]:
    """Runs everything in the engine to its end."""
    for request in requests:
        engine.submit(request)
    gained: dict[str, Gained] = {}
    while emissions := engine.poll(wait_s):
        gather(gained, emissions)
    return gained


def half_way(engine: Engine, count: int = 12) -> dict[str, Gained]:
    """One trajectory `t` of 40 greedy tokens, stopped in the middle."""
    engine.submit(ask("t", prompt(6), Sampling(temperature=0, tokens_max=40)))
    gained: dict[str, Gained] = {}
    while engine.stats().tokens < count:
        gather(gained, engine.poll(0.0))
    return gained


def to_the_end(engine: Engine, gained: dict[str, Gained]) -> Gained:
    """The tokens of `t` when nothing runs any more."""
    while engine.running():
        gather(gained, engine.poll(10.0))
    return gained["t"]


def to_first_stop(engine: Engine, name: str) -> Gained:
    gained: dict[str, Gained] = {}
    while name not in gained or gained[name].finish is None:
        gather(gained, engine.poll(10.0))
    assert gained[name].finish == "stop"
    return gained[name]


def resumed(request: GenerationRequest, gained: Gained) -> GenerationRequest:
    """The request that resumes from the generated tokens."""
    tokens = np.concatenate((request.tokens, np.array(gained.tokens, np.uint32)))
    generated = np.full(len(gained.tokens), GENERATED, np.uint8)
    return GenerationRequest(
        request.trajectory,
        request.group,
        tokens,
        np.concatenate((request.sources, generated)),
        request.sampling,
        request.seed,
        np.array(gained.logprobs, np.float32),
        (Span(0, len(gained.tokens), V1),),
    )


def plain_logprobs(model: PreTrainedModel, tokens: Iterable[int]) -> torch.Tensor:
    """Row i: log-probabilities of token i + 1 after tokens up to i, in one plain forward."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


def chosen_logprobs(model: PreTrainedModel, start: Tokens, gained: list[int]) -> torch.Tensor:
    """Log-probabilities of the generated tokens by one plain forward."""
    rows = plain_logprobs(model, [*start.tolist(), *gained])[len(start) - 1 : -1]
    return rows.gather(1, torch.tensor(gained)[:, None])[:, 0]
