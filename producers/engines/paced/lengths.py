"""Lengths of answers, in tokens: functions of (seed, prompt, trajectory, first token of the turn)
alone (invariant 10).
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
"""Random numbers (`uniforms`) of positions from this one on draw lengths; lower ones draw tokens.
"""
HALVINGS = 60  # of an interval of log-lengths: its width is then below one token at any length


class LengthDistribution(Protocol):
    def quantile(self, share: float) -> float:
        """Returns the length that this share of all answers does not exceed, `share` in (0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    p99: float

    @property
    def spread(self) -> float:
        return log(self.p99 / self.median) / P99

    def quantile(self, share: float) -> float:
        return self.median * exp(self.spread * NORMAL.inv_cdf(share))

    def share(self, length: float) -> float:
        if not self.spread:
            return float(length >= self.median)
        return NORMAL.cdf(log(length / self.median) / self.spread)


@dataclass(frozen=True, slots=True)
class LogNormalMixture:
    """`parts` are pairs of a weight and a distribution."""

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
    """`correlation` is that of two answers to one prompt: at 0 they are independent, at 1 equally
    long.
    """

    distribution: LengthDistribution
    correlation: float

    def draw(self, seed: int, prompt: Tokens, trajectory: str, begin: int) -> int:
        """Returns the length, at least 1, of the turn whose first token has index `begin`."""
        trajectory_keys = np.array([trajectory_key(seed, trajectory)], np.uint64)
        prompt_keys = np.array([_prompt_key(seed, prompt)], np.uint64)
        mine = _normal(trajectory_keys, LENGTH_POSITIONS_FROM + begin)
        shared = _normal(prompt_keys, LENGTH_POSITIONS_FROM)
        # A Gaussian copula: the distribution keeps its shape at any correlation.
        drawn = sqrt(self.correlation) * shared + sqrt(1 - self.correlation) * mine
        # Far in the tails the share rounds to 0 or 1, where no quantile exists.
        share = min(max(NORMAL.cdf(drawn), 1e-12), 1 - 1e-12)
        return max(1, round(self.distribution.quantile(share)))


def read_trace(path: str) -> LengthTrace:
    """Read one length per line; empty lines and `#` comments are skipped. Raises
    `ConfigurationError`, which names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"paced.lengths.trace: {path} cannot be read: {error}") from None
    lengths = [
        _length(path, number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lengths:
        raise ConfigurationError(f"paced.lengths.trace: {path} has no lengths, one a line")
    return LengthTrace(tuple(sorted(lengths)))


def mixture_of(parts: Sequence[tuple[float, LogNormal]]) -> LengthDistribution:
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
