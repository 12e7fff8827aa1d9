"""The piece `updates`: how long the engine `torch` stands still for a version, whole, as a delta
and as an adapter, while every slot decodes.
"""

import time
from collections.abc import Iterator, Mapping
from statistics import median

import numpy as np
import torch

from benchmarks.gpu_check.setup import QWEN2_5_0_5B, TINY
from benchmarks.weights.sides import nudged
from rollstream.producers.engines.base import EngineOptions, GenerationRequest, WeightUpdate
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.storage.lora import adapter_state, attach_adapters, attached_adapter, base_state
from rollstream.storage.models import build_model
from rollstream.storage.settings import LoraSettings
from rollstream.storage.weights.resident import TensorPatch
from rollstream.streams.values import Sampling, Version

SLOTS, PROMPT, CONTEXT = 16, 16, 512
UPDATES = 5
CHANGED = 0.01
RANK = 16
Tensors = Mapping[str, torch.Tensor]


def measure(*, is_tiny: bool) -> list[str]:
    """One line for each form of a version."""
    is_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if is_gpu else torch.float32
    model = build_model("Qwen2ForCausalLM", TINY if is_tiny else QWEN2_5_0_5B, seed=0)
    attach_adapters(model, LoraSettings(rank=RANK, alpha=32.0), 0, torch.bfloat16, "gpu-check")
    state, adapter = model.state_dict(), attached_adapter(model)
    assert adapter is not None
    base = {name: tensor.bfloat16() for name, tensor in base_state(state).items()}
    own = {name: tensor.bfloat16() for name, tensor in adapter_state(state).items()}
    device = "cuda" if is_gpu else "cpu"
    engine = TorchEngine(
        model.config, base, Version(0, 1), EngineOptions(SLOTS, CONTEXT, device=device), dtype=dtype
    )
    for row in range(SLOTS):
        engine.submit(_request(row, int(model.config.vocab_size)))
    lines: list[str] = []
    for kind in ("whole", "delta", "adapter"):
        updates = _updates(kind, base, own, adapter.scaling, engine.version)
        seconds = [_pause(engine, update) for update in updates]
        lines.append(
            f"update pause  {kind}: {median(seconds) * 1e3:.1f} ms (longest "
            f"{max(seconds) * 1e3:.1f}), {SLOTS} rows decoding"
        )
    return lines


def _request(row: int, vocabulary: int) -> GenerationRequest:
    prompt = np.random.default_rng(row).integers(1, vocabulary, PROMPT).astype(np.uint32)
    sampling = Sampling(tokens_max=CONTEXT - PROMPT - 1)
    return GenerationRequest(
        f"t{row}", row, prompt, np.zeros(PROMPT, np.uint8), sampling, 0, np.zeros(0, np.float32)
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


def _pause(engine: TorchEngine, update: WeightUpdate) -> float:
    """Seconds of the swap, for which no row decodes; the update is prepared beside decoding."""
    prepared = engine.prepare(update)
    for _ in range(3):
        engine.poll(0.0)
    assert engine.stats().running, "rows end only after the last update"
    _synchronise()
    began = time.perf_counter()
    engine.update(prepared, "in_flight")
    _synchronise()
    return time.perf_counter() - began


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
