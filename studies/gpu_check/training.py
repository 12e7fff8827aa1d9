"""Pieces of the check that train without an engine: step time, MFU and peak memory against the plan
for models made from a configuration, and a resumed step that repeats bit by bit.
"""

# pyright: reportUnknownMemberType=false

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.sizes.role import sample_of
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import form_of, total
from rollstream.run.sizes.devices import GB, accelerator_named
from rollstream.run.sizes.shapes import SHAPES, ModelShape, shape_of
from rollstream.storage.model_folder.lora import attach_adapters
from rollstream.storage.settings import LoraSettings
from rollstream.storage.starting_model.models import build_model
from studies.gpu_check.setup import TINY, config_of

WARM_STEPS, STEPS = 2, 5
RANK = 16
FULL_FLOPS, ADAPTER_FLOPS = 6, 4
"""Per parameter and token: the products of frozen matrices have no gradient of their weights.
Recomputed layers and attention are not counted.
"""


@dataclass(frozen=True, slots=True)
class TrainedSize:
    """A model, the rank of its adapter (0: all weights), and a step of `batches` micro-batches of
    `tokens` tokens, in trajectories of `context`.
    """

    config: Mapping[str, Any]
    rank: int
    batches: int
    tokens: int
    context: int

    @property
    def shape(self) -> ModelShape:
        return shape_of({"model_type": "qwen2", **self.config}, "measured")


SIZES = {
    "0.5b": TrainedSize(config_of(SHAPES["qwen2.5-0.5b"]), 0, 4, 16_384, 1024),
    "1.5b-lora": TrainedSize(config_of(SHAPES["qwen2.5-1.5b"]), RANK, 4, 16_384, 1024),
    "7b": TrainedSize(config_of(SHAPES["qwen2.5-7b"]), 0, 2, 8192, 1024),
}
REPEATED = TrainedSize(config_of(SHAPES["qwen2.5-0.5b"]), 0, 2, 8192, 1024)
TINY_SIZE = TrainedSize(TINY, 0, 2, 128, 64)


def measure(name: str, *, is_tiny: bool) -> list[str]:
    """Step time, speed and memory of one size. Where its whole state does not fit the card, it
    trains an adapter, and the line tells it.
    """
    size = SIZES[name]
    if is_tiny:
        size = replace(TINY_SIZE, rank=size.rank)
    size = _fitting(size)
    settings = _settings(size)
    learner = TorchLearner(_model(size), settings)
    batches = _batches(size)
    for _ in range(WARM_STEPS):
        _step(learner, batches)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = [_step(learner, batches) for _ in range(STEPS)]
    learner.close()
    kind = f"adapter of rank {size.rank}" if size.rank else "all weights"
    rate = size.batches * size.tokens / median(seconds)
    return [
        f"model         {size.shape.parameters / GB:.2f} billion parameters, {kind}, "
        f"{settings.compute}, layers recomputed",
        f"step          {median(seconds) * 1e3:,.0f} ms ({min(seconds) * 1e3:,.0f} to "
        f"{max(seconds) * 1e3:,.0f}), {size.batches} × {size.tokens:,} tokens",
        f"trainer       {rate:,.0f} tokens/s; {_mfu(size, rate)}",
        f"memory        {_memory(size, settings)}",
    ]


def repeat(*, is_tiny: bool) -> list[str]:
    """A step, a checkpoint of the state, and the next step; then the latter again by a learner that
    was loaded from the checkpoint. Raises `RuntimeError` if their hashes differ.
    """
    size = TINY_SIZE if is_tiny else REPEATED
    settings, batches = _settings(size), _batches(size)
    learner = TorchLearner(_model(size), settings)
    _step(learner, batches)
    state = {name: tensor.cpu() for name, tensor in learner.state().items()}
    _step(learner, batches)
    first = learner.state_hash()
    learner.close()
    del learner
    resumed = TorchLearner(_model(size), settings)
    resumed.load_state(state)
    _step(resumed, batches)
    second = resumed.state_hash()
    resumed.close()
    if first != second:
        raise RuntimeError(f"a resumed step has the state {second}, the first one had {first}")
    return [f"repeat        a resumed step has equal bits ({first[:16]}…)"]


def _fitting(size: TrainedSize) -> TrainedSize:
    if size.rank or not torch.cuda.is_available():
        return size
    needed = total(sums.trainer_lines(size.shape, form_of(_settings(size), 1)))
    memory = torch.cuda.mem_get_info()[1]
    usable = memory * (1 - sums.FRAGMENTED) - sums.CONTEXT_BYTES
    return size if needed <= usable else replace(size, rank=RANK)


def _settings(size: TrainedSize) -> TrainerSettings:
    return TrainerSettings(
        workers=1, threads=1, device="auto", compute="bfloat16", gradient_checkpointing=True,
        micro_batch_tokens=size.tokens, lr=1e-6, lr_ramp_steps=0,
    )  # fmt: skip


def _model(size: TrainedSize) -> PreTrainedModel:
    """The same weights for equal sizes, made on the card where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build_model("Qwen2ForCausalLM", size.config, seed=0)
        if size.rank:
            lora = LoraSettings(rank=size.rank, alpha=2.0 * size.rank)
            attach_adapters(model, lora, 0, torch.bfloat16, "gpu-check")
    return model


def _batches(size: TrainedSize) -> list[list[Sample]]:
    spec = {"model": size.config, "context": size.context}
    each = size.tokens // size.context
    numbers = range(size.batches * each)
    samples = [sample_of(spec, number) for number in numbers]
    return [samples[begin : begin + each] for begin in numbers[::each]]


def _step(learner: TorchLearner, batches: Sequence[Sequence[Sample]]) -> float:
    """Seconds of one update, the device's work included."""
    began = time.perf_counter()
    for samples in batches:
        learner.submit(samples)
    metrics = learner.finish_update()
    assert not metrics["updates_skipped"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _mfu(size: TrainedSize, rate: float) -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    card = accelerator_named(name)
    if card is None:
        return "MFU unknown (the device's peak is not in rollstream/run/sizes/devices.py)"
    flops = (ADAPTER_FLOPS if size.rank else FULL_FLOPS) * size.shape.parameters * rate
    return f"MFU {flops / card.flops:.3f} ({flops / 1e12:.1f} of {card.flops / 1e12:.0f} TFLOP/s)"


def _memory(size: TrainedSize, settings: TrainerSettings) -> str:
    planned = total(sums.trainer_lines(size.shape, form_of(settings, 1, size.rank)))
    if not torch.cuda.is_available():
        return f"planned {planned / GB:.3f} GB; the peak is measured on a GPU only"
    peak = torch.cuda.max_memory_allocated()
    return f"peak {peak / GB:.2f} GB, planned {planned / GB:.2f} GB ({planned / peak - 1:+.1%})"
