"""Computes how long a decode step lasts, in seconds (the roofline model: Williams, Waterman,
Patterson, 2009).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEARLY_FREE = 1.25
"""Rows are nearly free while a step lasts at most this many times as long as that of one row."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds to read all weights once, to read one token of the KV cache, for the arithmetic of
    one row, and for everything else.

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
        """Returns the seconds of a step with `kv_tokens` cached tokens in all."""
        reading, computing = self.weights_s + kv_tokens * self.kv_token_s, rows * self.row_s
        longer = max(reading, computing) if self.overlapping else reading + computing
        return longer + self.overhead_s

    def ends_s(self, rows: int, kv_tokens: float, steps: int) -> NDArray[np.float64]:
        """Returns the times from now at which the next `steps` steps end, with `kv_tokens` in the
        cache now.
        """
        # Each row adds one token per step.
        cached = kv_tokens + rows * np.arange(steps, dtype=np.float64)
        reading, computing = self.weights_s + cached * self.kv_token_s, rows * self.row_s
        longer = np.maximum(reading, computing) if self.overlapping else reading + computing
        return np.cumsum(longer + self.overhead_s)

    def prefill_s(self, tokens: int) -> float:
        return tokens * self.prefill_token_s


def roofline_of_hardware(
    model_bytes: float,
    bandwidth: float,
    kv_token_bytes: float,
    token_flops: float,
    flops: float,
    overhead_s: float,
) -> Roofline:
    """`token_flops` are operations per token; the accelerator reads `bandwidth` bytes and computes
    `flops` operations per second. Prefill is assumed to be limited by arithmetic alone.
    """
    return Roofline(
        weights_s=model_bytes / bandwidth,
        kv_token_s=kv_token_bytes / bandwidth,
        row_s=token_flops / flops,
        overhead_s=overhead_s,
        prefill_token_s=token_flops / flops,
    )


def batch_max(roofline: Roofline, slots: int) -> int:
    """Returns the largest batch whose step lasts at most `NEARLY_FREE` times as long as a step of
    one row.
    """
    # Without reads of the KV cache: a sequence costs the same reads on whichever rollout it runs.
    limit = NEARLY_FREE * roofline.step_s(1, 0)
    few, many = 1, slots
    while few < many:
        middle = (few + many + 1) // 2
        if roofline.step_s(middle, 0) <= limit:
            few = middle
        else:
            many = middle - 1
    return few
