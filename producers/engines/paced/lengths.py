"""Draws the lengths of answers, in tokens, for the engine `paced`, which generates without a model:
from a long-tailed distribution or from recorded lengths (`LengthSampler`).

A length is a function of (seed, prompt, trajectory, first token of the turn) alone, so it is the
same on every rollout and after every move (invariant 10). Lengths of answers to one prompt are
correlated: a normal draw of the prompt and one of the trajectory are added, and their sum selects
a quantile (a Gaussian copula). So a distribution keeps its shape at any correlation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
import xxhash

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.streams.values import Tokens

NORMAL = NormalDist()
P99 = NORMAL.inv_cdf(0.99)
LENGTH_POSITIONS_FROM = 1 << 40
"""The random numbers (`uniforms`) of positions from this one on draw lengths; those of lower
positions draw tokens.
"""
HALVINGS = 60  # of an interval of log-lengths: its width is then below one token at any length


class LengthDistribution(Protocol):
    """Describes how long answers are, by quantiles; the three classes below implement it."""

    def quantile(self, share: float) -> float:
        """Returns the length that this share of all answers does not exceed, `share` in (0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The log-normal distribution of which half of the answers are shorter than `median` and one in
    a hundred is longer than `p99`.
    """

    median: float
    p99: float

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return log(self.p99 / self.median) / P99

    def quantile(self, share: float) -> float:
        return self.median * exp(self.spread * NORMAL.inv_cdf(share))

    def share(self, length: float) -> float:
        """Returns the share of answers that are at most this long."""
        if not self.spread:
            return float(length >= self.median)
        return NORMAL.cdf(log(length / self.median) / self.spread)


@dataclass(frozen=True, slots=True)
class LogNormalMixture:
    """Mixes log-normal distributions, e.g. of short answers and of long derivations: `parts` are
    pairs of a weight and a distribution. A quantile is found by bisection.
    """

    parts: tuple[tuple[float, LogNormal], ...]

    def quantile(self, share: float) -> float:
        total = sum(weight for weight, _ in self.parts)
        ends = [part.quantile(share) for _, part in self.parts]
        low, high = log(min(ends)), log(max(ends))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            below = sum(w * part.share(exp(middle)) for w, part in self.parts)
            low, high = (middle, high) if below < share * total else (low, middle)
        return exp(high)


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """The distribution of recorded lengths, which must ascend."""

    lengths: tuple[float, ...]

    def quantile(self, share: float) -> float:
        return self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))]


@dataclass(frozen=True, slots=True)
class LengthSampler:
    """Draws lengths from `distribution`. `correlation` is that of two answers to one prompt, in the
    same or another pass over the prompts: at 0 they are independent, at 1 equally long.
    """

    distribution: LengthDistribution
    correlation: float

    def draw(self, seed: int, prompt: Tokens, trajectory: str, begin: int) -> int:
        """Returns the length, at least 1, of the turn whose first token has index `begin` in this
        trajectory.
        """
        own = np.array([trajectory_key(seed, trajectory)], np.uint64)
        asked = np.array([_prompt_key(seed, prompt)], np.uint64)
        mine = _normal(own, LENGTH_POSITIONS_FROM + begin)
        shared = _normal(asked, LENGTH_POSITIONS_FROM)
        drawn = sqrt(self.correlation) * shared + sqrt(1 - self.correlation) * mine
        # Far in the tails the share rounds to 0 or 1, where no quantile exists.
        share = min(max(NORMAL.cdf(drawn), 1e-12), 1 - 1e-12)
        return max(1, round(self.distribution.quantile(share)))


def read_trace(path: str) -> LengthTrace:
    """Read a text file with one length per line, in any order. Empty lines and lines that begin
    with `#` are skipped. Raises `ConfigurationError`, which names the line that is not a length.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"paced.lengths.trace: {path} cannot be read: {error}") from None
    found = [
        _length(path, number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not found:
        raise ConfigurationError(f"paced.lengths.trace: {path} has no lengths, one a line")
    return LengthTrace(tuple(sorted(found)))


def mixture_of(parts: Sequence[tuple[float, LogNormal]]) -> LengthDistribution:
    """Returns the mixture of these weighted parts; a single part is returned itself."""
    return parts[0][1] if len(parts) == 1 else LogNormalMixture(tuple(parts))


def _length(path: str, number: int, line: str) -> float:
    try:
        length = float(line)
    except ValueError:
        length = 0.0
    if not 1 <= length < LENGTH_POSITIONS_FROM:
        raise ConfigurationError(
            f"paced.lengths.trace: line {number} of {path} is {line[:40]!r}, not a length ≥ 1"
        )
    return length


def _prompt_key(seed: int, prompt: Tokens) -> int:
    content = np.ascontiguousarray(prompt, "<u4").tobytes()
    return xxhash.xxh3_64_intdigest(content, seed=seed % 2**64)


def _normal(key: np.ndarray[tuple[int], np.dtype[np.uint64]], position: int) -> float:
    drawn = float(uniforms(key, np.array([position]))[0])
    return NORMAL.inv_cdf(min(max(drawn, 1e-16), 1 - 1e-16))
