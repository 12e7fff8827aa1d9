"""The lengths of the answers to each prompt, drawn or taken from a run; the same under every
policy.

A group's lengths are a function of (seed, pass, prompt) alone, so policies are compared on the same
work. Two answers to one prompt correlate as in the paced engine: a Gaussian copula with one part
per prompt, shared by all passes, and one part per answer. History therefore predicts part of a
length.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.engines.paced.lengths import NORMAL, LengthDistribution

EDGE, KNOTS = 6.0, 2_401
"""Quantiles are tabulated at this many normal deviates up to ±EDGE; beyond it is one
answer in 10⁹.
"""
DEVIATES = np.linspace(-EDGE, EDGE, KNOTS)


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Maps normal deviates to answer lengths, cut at `longest` as a token limit cuts them."""

    distribution: LengthDistribution
    correlation: float
    longest: int
    table: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shares = (NORMAL.cdf(float(at)) for at in DEVIATES)
        table = np.array([self.distribution.quantile(min(max(s, 1e-9), 1 - 1e-9)) for s in shares])
        object.__setattr__(self, "table", table)

    def of(self, deviates: NDArray[np.float64]) -> NDArray[np.int64]:
        """Whole tokens, 1 to `longest`."""
        drawn = np.interp(deviates, DEVIATES, self.table)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, repeated pass after pass, with `samples` answers each."""

    lengths: AnswerLengths
    samples: int
    prompts: int
    prompt_tokens: int
    seed: int

    def group(self, number: int) -> list[int]:
        """Lengths of the answers of the `number`-th admitted group."""
        return self._drawn(number // self.prompts, number % self.prompts)

    def prompt_of(self, number: int) -> int:
        return number % self.prompts

    def earlier(self, prompt: int) -> list[int]:
        """Lengths of the prompt's answers in the pass before the first: the history at
        the start.
        """
        return self._drawn(-1, prompt)

    def _drawn(self, pass_: int, prompt: int) -> list[int]:
        shared = np.random.default_rng([self.seed, 1, prompt]).standard_normal()
        own = np.random.default_rng([self.seed, 2, pass_ + 1, prompt]).standard_normal(self.samples)
        part = self.lengths.correlation
        return self.lengths.of(np.sqrt(part) * shared + np.sqrt(1 - part) * own).tolist()


@dataclass(frozen=True, slots=True)
class RecordedWorkload(Workload):
    """The recorded answers of a run, group by group; missing groups are drawn. There is no history
    at the start.
    """

    groups: tuple[tuple[int, ...], ...] = ()

    def group(self, number: int) -> list[int]:
        had = self.groups[number] if number < len(self.groups) else ()
        drawn = Workload.group(self, number)
        return [*had, *drawn[len(had) :]]

    def earlier(self, prompt: int) -> list[int]:
        return []
