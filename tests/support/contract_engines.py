"""The engines of the conformance suite, each behind the same few calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollstream.producers.engines.base import Engine
from tests.support import engine_samples, paced_samples
from tests.support.engine_samples import VOCABULARY
from tests.support.masked_engine import MaskedEngine

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """`open(slots, context_max, emit_every)` serves version V1 of `weights(0)`; `tensor` is the
    name of a tensor of every version.
    """

    open: Callable[..., Engine]
    weights: Callable[[int], Tensors]
    tensor: str


def _torch(**sizes: Any) -> Engine:
    return engine_samples.open_torch(engine_samples.tiny_model("qwen3"), **sizes)


def _masked(**sizes: Any) -> Engine:
    engine: Any = MaskedEngine(_torch(**sizes))
    return engine


def _torch_weights(seed: int) -> Tensors:
    return dict(engine_samples.tiny_model("qwen3", seed).state_dict())


def _paced_weights(seed: int) -> Tensors:
    return {name: tensor + seed for name, tensor in paced_samples.WEIGHTS.items()}


KINDS = {
    "torch": Kind(_torch, _torch_weights, "model.layers.0.mlp.up_proj.weight"),
    "masked": Kind(_masked, _torch_weights, "model.layers.0.mlp.up_proj.weight"),
    "paced": Kind(paced_samples.open_paced, _paced_weights, "layers.00"),
}
assert paced_samples.VOCABULARY == VOCABULARY
