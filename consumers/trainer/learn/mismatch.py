"""Measures, by task, how far the engine's and the trainer's log-probabilities of the same tokens
differ: at lag 0 by rounding or a bug (docs/explanation/learning.md, Mismatch of engine and
trainer).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollstream.consumers.trainer.data.metrics import TASKS_MAX
from rollstream.consumers.trainer.data.sample import Sample

TOKEN_MAX = 0.1
"""In nats: about a tenth in probability."""
EXPONENT_MAX = 20.0
"""Of |Δ| in e^Δ: one broken value must not make a metric infinite."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Sums over `tokens` of one task and `lag` of the differences Δ, trainer minus engine:
    `absolute` is Σ|Δ|, `kl` is Σ(e^Δ − 1 − Δ), an estimate of the KL divergence, `above` counts |Δ|
    above `TOKEN_MAX`.
    """

    lag: int
    tokens: int
    absolute: float
    kl: float
    above: int
    largest: float

    def __add__(self, other: "LogprobGap") -> "LogprobGap":
        # The smaller lag alone counts.
        if self.lag != other.lag:
            return self if self.lag < other.lag else other
        return LogprobGap(
            self.lag,
            self.tokens + other.tokens,
            self.absolute + other.absolute,
            self.kl + other.kl,
            self.above + other.above,
            max(self.largest, other.largest),
        )


@dataclass(frozen=True, slots=True)
class LogprobGaps:
    """One gap for each task, at its smallest lag, in the order of first tokens."""

    by_task: tuple[tuple[str, LogprobGap], ...] = ()

    def __add__(self, other: "LogprobGaps") -> "LogprobGaps":
        return _merged((*self.by_task, *other.by_task))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics at lag 0 `mismatch_<name>` over all tokens, and
        `mismatch_<name>/<task>` for each of the first `TASKS_MAX` tasks. A task without a token at
        lag 0 has `mismatch_tokens/<task>` 0 and, instead of the others, its smallest lag and mean
        |Δ| there (`mismatch_near_…`).
        """
        if not self.by_task:
            return {}
        exact = [gap for _, gap in self.by_task if gap.lag == 0]
        metrics = _gap_metrics(sum(exact[1:], exact[0]), "") if exact else {"mismatch_tokens": 0.0}
        for task, gap in self.by_task[:TASKS_MAX]:
            if gap.lag == 0:
                metrics |= _gap_metrics(gap, f"/{task}")
            else:
                metrics[f"mismatch_tokens/{task}"] = 0.0
                metrics[f"mismatch_near_lag/{task}"] = float(gap.lag)
                metrics[f"mismatch_near_mean/{task}"] = gap.absolute / gap.tokens
        return metrics


def logprob_gaps(logprobs: Tensor, samples: Sequence[Sample], version: int) -> LogprobGaps:
    """Returns the logprob gaps of a micro-batch that is trained from `version`; `logprobs` [G] are
    the trainer's. For the first update of a step only: later ones train from weights without a
    version number.
    """
    recorded = np.concatenate([sample.logprobs[sample.mask] for sample in samples])
    delta = logprobs.detach().cpu().numpy().astype(np.float64) - recorded
    gaps: list[tuple[str, LogprobGap]] = []
    begin = 0
    for sample in samples:
        # The first span alone: tokens of later ones may have been sampled over a KV cache of older
        # weights.
        first = sample.spans[0]
        lag = version - first.version.number
        compared = int(np.count_nonzero(sample.mask[: first.end]))
        if compared and lag >= 0:
            gaps.append((sample.task, _gap(lag, delta[begin : begin + compared])))
        begin += int(np.count_nonzero(sample.mask))
    return _merged(gaps)


def _gap(lag: int, delta: NDArray[np.float64]) -> LogprobGap:
    size = np.abs(delta)
    bounded = delta.clip(-EXPONENT_MAX, EXPONENT_MAX)
    return LogprobGap(
        lag,
        len(delta),
        float(size.sum()),
        float((np.expm1(bounded) - bounded).sum()),
        int(np.count_nonzero(size > TOKEN_MAX)),
        float(size.max()),
    )


def _merged(parts: Iterable[tuple[str, LogprobGap]]) -> LogprobGaps:
    by_task: dict[str, LogprobGap] = {}
    for task, gap in parts:
        by_task[task] = by_task[task] + gap if task in by_task else gap
    return LogprobGaps(tuple(by_task.items()))


def _gap_metrics(gap: LogprobGap, of: str) -> dict[str, float]:
    return {
        f"mismatch_tokens{of}": float(gap.tokens),
        f"mismatch_mean{of}": gap.absolute / gap.tokens,
        f"mismatch_max{of}": gap.largest,
        f"mismatch_kl{of}": gap.kl / gap.tokens,
        f"mismatch_above{of}": gap.above / gap.tokens,
    }
