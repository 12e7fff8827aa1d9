"""Paced engines on a manual clock, and their outputs."""

from dataclasses import dataclass
from functools import partial

import torch

from rollstream.producers.engines.paced.engine import PacedEngine
from rollstream.producers.engines.paced.lengths import LengthSampler, LogNormal
from rollstream.producers.engines.roofline import Roofline
from tests.support import engine_samples
from tests.support.engine_samples import V1

ROOFLINE = Roofline(
    weights_s=4e-3, kv_token_s=2e-5, row_s=1e-4, overhead_s=1e-3, prefill_token_s=5e-5
)
VOCABULARY = 19  # the vocabulary of the tiny models
WEIGHTS = {"layers.00": torch.arange(64, dtype=torch.bfloat16).view(8, 8), "head": torch.ones(6)}


@dataclass(slots=True)
class HandPace:
    """Time that advances only while a thread waits for it."""

    at_s: float = 100.0
    scale: float = 1.0

    def now(self) -> float:
        return self.at_s

    def wait_until(self, at_s: float) -> None:
        self.at_s = max(self.at_s, at_s)


def open_paced(
    slots: int = 4,
    context_max: int = 96,
    emit_every: int = 64,
    kv_capacity: int | None = None,
    median: float = 20.0,
    pace: HandPace | None = None,
    correlation: float = 0.7,
) -> PacedEngine:
    lengths = LengthSampler(LogNormal(median, 10 * median), correlation)
    capacity = slots * context_max if kv_capacity is None else kv_capacity
    return PacedEngine(
        WEIGHTS,
        V1,
        pace or HandPace(),
        slots=slots,
        context_max=context_max,
        kv_capacity=capacity,
        vocabulary=VOCABULARY,
        roofline=ROOFLINE,
        lengths=lengths,
        emit_every=emit_every,
    )


run_all = partial(engine_samples.run_all, wait_s=1000.0)  # of a clock without a waiting thread
