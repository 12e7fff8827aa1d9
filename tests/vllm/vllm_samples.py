"""Tiny models whose heads vLLM's CPU kernels support, and engines of them."""

from collections.abc import Mapping
from functools import partial

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.storage.weights.mapped import MappedTensors, MappedWeights
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Sampling, Version
from testbed.memory import MemoryStore
from tests.support.engine_samples import SIZES, V1, V2, Gained, ask, gather, prompt, random_model

WIDE = SIZES | {"hidden_size": 128}  # 4 heads of 32
FAMILIES = {
    "llama": partial(LlamaConfig, **WIDE, tie_word_embeddings=False),
    "qwen2": partial(Qwen2Config, **WIDE, tie_word_embeddings=True),
    "qwen3": partial(Qwen3Config, **SIZES, head_dim=32, tie_word_embeddings=True),
}
CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}


def vllm_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Random values for all weights."""
    return random_model(lambda: CLASSES[family](FAMILIES[family]()), seed)


def held_in_file(tensors: Mapping[str, torch.Tensor]) -> MappedTensors:
    """These tensors as a rollout holds a large version."""
    store, held = MemoryStore(), MappedWeights()
    publish_version(store, NewVersion("run", V2, dict(tensors), {}, 1 << 20, 0.0))
    held.update(store, V2)
    return held.tensors


def open_vllm(
    model: PreTrainedModel, slots: int = 4, context_max: int = 96, emit_every: int = 64
) -> VllmEngine:
    """In this process, stepped by the test."""
    state, sizes = model.state_dict(), (slots, context_max, emit_every)
    return VllmEngine(
        model.config, state, V1, EngineOptions(*sizes), settings=VllmSettings(process=False)
    )


def check_two_hundred_updates(engine: VllmEngine, poll_s: float) -> None:
    check_all_whole(engine, take_updates(engine, 200, 12, poll_s), 200, 12)


def take_updates(engine: VllmEngine, count: int, tokens: int, poll_s: float) -> dict[str, Gained]:
    """Versions 2, 3, … under load, a request of so many tokens before each; returns the
    emissions.
    """
    states = [dict(vllm_model("qwen3", seed).state_dict()) for seed in (0, 1)]
    gained: dict[str, Gained] = {}
    for number in range(2, 2 + count):
        engine.submit(ask(f"t{number}", prompt(6, number), Sampling(tokens_max=tokens)))
        gather(gained, engine.poll(poll_s))
        mode = "in_flight" if number % 3 else "in_flight_recompute"
        engine.update(WeightUpdate(Version(number, 1), states[number % 2]), mode)
    return gained


def check_all_whole(engine: VllmEngine, gained: dict[str, Gained], count: int, tokens: int) -> None:
    """At the end no request is lost or repeated, and versions only grew."""
    while engine.running():
        gather(gained, engine.poll(10.0))
    assert sorted(gained) == sorted(f"t{number}" for number in range(2, 2 + count))
    for mine in gained.values():
        assert (len(mine.tokens), len(mine.logprobs), mine.finish) == (tokens, tokens, "length")
        numbers = [version.number for version, _ in mine.spans]
        assert numbers == sorted(set(numbers))
