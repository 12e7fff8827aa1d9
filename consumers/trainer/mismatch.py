"""Engine against trainer: how far their log-probabilities of the same tokens under the same version
are apart, by task.

Compared is what both sides compute alike, so that only rounding is left, or a mistake: trained
tokens of the very version that is trained from (lag 0), in the first update of a step (the next one
trains from weights that have no number), and only of a trajectory's first span: later ones may have
been drawn over a KV cache of older weights. A task without such a token says so, and has the
figures of its smallest lag apart from the others: they hold what was learnt in between.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from consumers.trainer.sample import Sample

TOKEN_MAX = 0.1
"""Nats that a token may be off before it counts as `above`: a tenth in probability."""
EXPONENT_MAX = 20.0
"""As in the loss: one broken log-probability must not make a figure infinite."""

TASKS_MAX = 64
"""That have figures of their own: rollouts choose the labels."""


@dataclass(frozen=True, slots=True)
class Gap:
    """`tokens` of one task at one `lag`: sums of |Δ| and of e^Δ − 1 − Δ, how many |Δ| are above
    `TOKEN_MAX`, and the largest; Δ is the trainer's log-probability minus the engine's.
    """

    lag: int
    tokens: int
    absolute: float
    kl: float
    above: int
    largest: float

    def __add__(self, other: "Gap") -> "Gap":
        """The smaller lag counts alone; equal ones together."""
        if self.lag != other.lag:
            return self if self.lag < other.lag else other
        return Gap(
            self.lag,
            self.tokens + other.tokens,
            self.absolute + other.absolute,
            self.kl + other.kl,
            self.above + other.above,
            max(self.largest, other.largest),
        )


@dataclass(frozen=True, slots=True)
class Gaps:
    """A `Gap` for each task, in the order of their first tokens."""

    by_task: tuple[tuple[str, Gap], ...] = ()

    def __add__(self, other: "Gaps") -> "Gaps":
        return _merged((*self.by_task, *other.by_task))

    def metrics(self) -> dict[str, float]:
        """`mismatch_<figure>/<task>`, and without a task those of all tokens at lag 0. Nothing at
        all where nothing was compared.
        """
        if not self.by_task:
            return {}
        exact = [gap for _, gap in self.by_task if gap.lag == 0]
        found = _figures(sum(exact[1:], exact[0]), "") if exact else {"mismatch_tokens": 0.0}
        for task, gap in self.by_task[:TASKS_MAX]:
            if gap.lag == 0:
                found |= _figures(gap, f"/{task}")
            else:
                found[f"mismatch_tokens/{task}"] = 0.0
                found[f"mismatch_near_lag/{task}"] = float(gap.lag)
                found[f"mismatch_near_mean/{task}"] = gap.absolute / gap.tokens
        return found


def gaps_of(logprobs: Tensor, samples: Sequence[Sample], version: int) -> Gaps:
    """Of a micro-batch trained from `version`; `logprobs` [G] are the trainer's of its trained
    tokens, in the order of the samples.
    """
    theirs = np.concatenate([sample.logprobs[sample.mask] for sample in samples])
    delta = logprobs.detach().cpu().numpy().astype(np.float64) - theirs
    found: list[tuple[str, Gap]] = []
    begin = 0
    for sample in samples:
        first = sample.spans[0]
        lag = version - first.version.number
        mine = int(np.count_nonzero(sample.mask[: first.end]))
        if mine and lag >= 0:
            found.append((sample.task, _gap(lag, delta[begin : begin + mine])))
        begin += int(np.count_nonzero(sample.mask))
    return _merged(found)


def _gap(lag: int, delta: NDArray[np.float64]) -> Gap:
    size = np.abs(delta)
    bounded = delta.clip(-EXPONENT_MAX, EXPONENT_MAX)
    return Gap(
        lag,
        len(delta),
        float(size.sum()),
        float((np.expm1(bounded) - bounded).sum()),
        int(np.count_nonzero(size > TOKEN_MAX)),
        float(size.max()),
    )


def _merged(parts: Iterable[tuple[str, Gap]]) -> Gaps:
    found: dict[str, Gap] = {}
    for task, gap in parts:
        found[task] = found[task] + gap if task in found else gap
    return Gaps(tuple(found.items()))


def _figures(gap: Gap, of: str) -> dict[str, float]:
    return {
        f"mismatch_tokens{of}": float(gap.tokens),
        f"mismatch_mean{of}": gap.absolute / gap.tokens,
        f"mismatch_max{of}": gap.largest,
        f"mismatch_kl{of}": gap.kl / gap.tokens,
        f"mismatch_above{of}": gap.above / gap.tokens,
    }
