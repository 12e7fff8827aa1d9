"""The pieces `updates` and `updates-vllm`: how long an engine stands still for a version, whole, as
a delta and as an adapter, while every slot decodes.
"""

import time
from collections.abc import Iterator, Mapping
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedConfig

from benchmarks.weights.sides import nudged
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Engine, GenerationRequest, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.storage.model_folder.lora import (
    adapter_state,
    attach_adapters,
    attached_adapter,
    base_state,
)
from rollstream.storage.settings import LoraSettings
from rollstream.storage.starting_model.models import build_model
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Sampling, Version
from studies.gpu_check.setup import QWEN2_5_0_5B, TINY

SLOTS, PROMPT, CONTEXT = 16, 16, 512
UPDATES = 5
CHANGED = 0.01
RANK = 16
TOKENS = 512  # of a vocabulary, that of the tiny model
MEMORY_SHARE = 0.4  # of the card, for each of two engines of vLLM
START_S = 60.0
Tensors = Mapping[str, torch.Tensor]


def measure(engine: str, *, is_tiny: bool) -> list[str]:
    """One line for each form of a version, on the engine of this name."""
    model = build_model("Qwen2ForCausalLM", TINY if is_tiny else QWEN2_5_0_5B, seed=0)
    attach_adapters(model, LoraSettings(rank=RANK, alpha=32.0), 0, torch.bfloat16, "gpu-check")
    state, adapter = model.state_dict(), attached_adapter(model)
    assert adapter is not None
    stored, _ = untie(base_state(state))
    base = {name: tensor.bfloat16() for name, tensor in stored.items()}
    own = {name: tensor.bfloat16() for name, tensor in adapter_state(state).items()}
    lines: list[str] = []
    for kinds, rank in ((("whole", "delta"), 0), (("adapter",), RANK)):
        opened = _opened(engine, model.config, base, rank)
        served = Version(0, 1)
        for kind in kinds:
            updates = list(_updates(kind, base, own, adapter.scaling, served))
            seconds = [_pause(opened, update) for update in updates]
            served = updates[-1].version
            lines.append(
                f"update pause  {engine}, {kind}: {median(seconds) * 1e3:.1f} ms (longest "
                f"{max(seconds) * 1e3:.1f}), {SLOTS} rows decoding"
            )
    return lines


def _opened(name: str, config: PreTrainedConfig, base: Tensors, rank: int) -> Engine:
    """The engine of a run of such versions: vLLM makes room for adapters when it opens."""
    is_gpu = torch.cuda.is_available()
    dtype, device = ("bfloat16", "cuda") if is_gpu else ("float32", "cpu")
    options = EngineOptions(SLOTS, CONTEXT, device=device, dtype=dtype, adapter_rank=rank)
    vllm = VllmSettings(memory_share=MEMORY_SHARE)
    return open_engine(name, config, base, Version(0, 1), options, vllm=vllm)


def _fill(engine: Engine, number: int) -> None:
    """Every slot decodes a new request; those of the version before are dropped."""
    for row in range(SLOTS):
        engine.abort(f"{number - 1}.{row}")
    for row in range(SLOTS):
        engine.submit(_request(f"{number}.{row}", row))
    given_up = time.monotonic() + START_S
    while engine.stats().running < SLOTS:
        engine.poll(0.01)
        assert time.monotonic() < given_up, "not every slot decodes"


def _request(name: str, row: int) -> GenerationRequest:
    prompt = np.random.default_rng(row).integers(1, TOKENS, PROMPT).astype(np.uint32)
    sampling = Sampling(tokens_max=CONTEXT - PROMPT - 1)
    return GenerationRequest(
        name, row, prompt, np.zeros(PROMPT, np.uint8), sampling, 0, np.zeros(0, np.float32)
    )


def _updates(
    kind: str, base: Tensors, adapter: Tensors, scaling: float, served: Version
) -> Iterator[WeightUpdate]:
    """The next versions; a delta changes one weight in a hundred by one step of its mantissa."""
    tensors = dict(base)
    for number in range(served.number + 1, served.number + 1 + UPDATES):
        version = Version(number, 1)
        if kind == "adapter":
            yield WeightUpdate(
                version, {n: t * number for n, t in adapter.items()}, scaling=scaling
            )
        elif kind == "whole":
            yield WeightUpdate(version, tensors)
        else:
            new = nudged(tensors, CHANGED, number)
            patches = tuple(_patch(name, tensors[name], new[name]) for name in new)
            yield WeightUpdate(version, new, Version(number - 1, 1), patches)
            tensors = new


def _patch(name: str, old: torch.Tensor, new: torch.Tensor) -> TensorPatch:
    at = (old.view(-1) != new.view(-1)).nonzero().view(-1)
    return TensorPatch(name, tuple(new.shape), new.dtype, at, new.view(-1)[at])


def _pause(engine: Engine, update: WeightUpdate) -> float:
    """Seconds of the swap, for which no row decodes; the update is prepared beside decoding."""
    prepared = engine.prepare(update)
    _fill(engine, update.version.number)
    _synchronise()
    began = time.perf_counter()
    engine.update(prepared, "in_flight")
    _synchronise()
    return time.perf_counter() - began


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
