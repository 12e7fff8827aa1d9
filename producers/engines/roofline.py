"""Computes how long a decode step lasts, from its batch and the KV cache that it reads (roofline:
Williams, Waterman, Patterson, 2009). Pure functions in seconds. The paced engine uses them in
real time, the simulator in virtual time, and `rollstream profile` fits them to a real engine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEARLY_FREE = 1.25
"""One more row is nearly free while the step lasts at most this many times as long as a step of one
row.
"""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of the parts of a step: `weights_s` to read all weights once, `kv_token_s` to read
    the KV of one token, `row_s` for the arithmetic of one row, `overhead_s` for everything else,
    and `prefill_token_s` for one prefilled token.

    An accelerator reads while it computes (`overlapping`), so the longer of the two counts; on a
    CPU they add up.
    """

    weights_s: float
    kv_token_s: float
    row_s: float
    overhead_s: float = 0.0
    prefill_token_s: float = 0.0
    overlapping: bool = True

    def step_s(self, rows: int, kv_tokens: float) -> float:
        """Seconds of one decode step of `rows` sequences with `kv_tokens` cached tokens in all."""
        reading, computing = self.weights_s + kv_tokens * self.kv_token_s, rows * self.row_s
        longer = max(reading, computing) if self.overlapping else reading + computing
        return longer + self.overhead_s

    def ends_s(self, rows: int, kv_tokens: float, steps: int) -> NDArray[np.float64]:
        """When each of the next `steps` steps of the same rows ends, in seconds from now; every row
        caches one more token per step.
        """
        cached = kv_tokens + rows * np.arange(steps, dtype=np.float64)
        reading, computing = self.weights_s + cached * self.kv_token_s, rows * self.row_s
        longer = np.maximum(reading, computing) if self.overlapping else reading + computing
        return np.cumsum(longer + self.overhead_s)

    def prefill_s(self, tokens: int) -> float:
        """Seconds that prefilling this many tokens takes before the next decode step."""
        return tokens * self.prefill_token_s


def roofline_of_hardware(
    model_bytes: float,
    bandwidth: float,
    kv_token_bytes: float,
    token_flops: float,
    flops: float,
    overhead_s: float,
) -> Roofline:
    """The roofline of a model on an accelerator, from bytes, bytes per second, and floating-point
    operations per token and per second. Prefill is bound by arithmetic.
    """
    return Roofline(
        weights_s=model_bytes / bandwidth,
        kv_token_s=kv_token_bytes / bandwidth,
        row_s=token_flops / flops,
        overhead_s=overhead_s,
        prefill_token_s=token_flops / flops,
    )


def batch_max(roofline: Roofline, slots: int) -> int:
    """B_max: the largest batch up to `slots` at which one more row is nearly free in a decode step,
    at least 1. Reads of the KV cache are left out: they cost the same on every rollout.
    """
    limit = NEARLY_FREE * roofline.step_s(1, 0)
    few, many = 1, slots
    while few < many:
        middle = (few + many + 1) // 2
        if roofline.step_s(middle, 0) <= limit:
            few = middle
        else:
            many = middle - 1
    return few
