"""Intervals, tests and power for means and paired differences (Student's t), and the percentile
bootstrap, by NumPy without SciPy. Pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

# Sources: the paired t-test of textbooks; Schuirmann, "A comparison of the two one-sided tests
# procedure" (1987), for equivalence; Efron and Tibshirani, "An Introduction to the Bootstrap"
# (1993), chapter 13, for the percentile interval.
CONFIDENCE = 0.95
EQUIVALENCE_LEVEL = 0.05
"""Of each one-sided test, so the interval that must lie within the margin has 90 %."""
POWER = 0.8  # at which `detectable` is stated
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """The mean interval of `count` independent values, at `confidence`. Both ends are infinite for
    fewer than two values.
    """

    count: int
    mean: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference second − first over `pairs` pairs, with its interval at `confidence`.

    `deviation` is the standard deviation of the differences, `p` the two-sided p-value of "no
    difference", `detectable` the smallest true difference that such a test finds with a probability
    of 80 %. `correlation` is that of the pairs (nan if a side is constant): pairing helps if it is
    above 0.
    """

    pairs: int
    first: float
    second: float
    difference: float
    deviation: float
    low: float
    high: float
    confidence: float
    p: float
    detectable: float
    correlation: float


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests of |difference| < `margin`. `low` and `high` are the ends of the 90 %
    interval; `is_shown` (`p` < 5 %): both lie within the margin. `power` is the probability of that
    if the true difference is 0: a failed test with little power decides nothing.
    """

    margin: float
    low: float
    high: float
    p: float
    is_shown: bool
    power: float


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> MeanInterval:
    """Returns the mean interval of at least one value, with Student's interval."""
    count, mean = len(values), fmean(values)
    if count < 2:
        return MeanInterval(count, mean, -math.inf, math.inf, confidence)
    half = student_quantile((1 + confidence) / 2, count - 1) * stdev(values) / math.sqrt(count)
    return MeanInterval(count, mean, mean - half, mean + half, confidence)


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> PairedDifference:
    """Returns the paired difference of two equally long sequences of at least two values. Raises
    `ValueError` for fewer.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"{len(differences)} pairs: an interval needs two at least")
    interval = mean_interval(differences, confidence)
    deviation = stdev(differences)
    return PairedDifference(
        interval.count,
        fmean(first),
        fmean(second),
        interval.mean,
        deviation,
        interval.low,
        interval.high,
        confidence,
        _two_sided(interval.mean, deviation, interval.count),
        detectable_difference(deviation, interval.count, 1 - confidence),
        _correlation(first, second),
    )


def equivalence(
    comparison: PairedDifference, margin: float, level: float = EQUIVALENCE_LEVEL
) -> Equivalence:
    """Returns the equivalence for a margin above 0."""
    degrees, error = comparison.pairs - 1, comparison.deviation / math.sqrt(comparison.pairs)
    half = student_quantile(1 - level, degrees) * error
    low, high = comparison.difference - half, comparison.difference + half
    nearest = margin - abs(comparison.difference)  # distance to the bound that is nearer
    p = _upper_tail(nearest, error, degrees)
    is_shown = -margin < low and high < margin
    power = equivalence_power(margin, comparison.deviation, comparison.pairs, level)
    return Equivalence(margin, low, high, p, is_shown, power)


def difference_power(difference: float, deviation: float, pairs: int, level: float) -> float:
    """The probability that the two-sided paired t-test at `level` rejects "no difference" for this
    true mean difference and standard deviation.
    """
    if deviation == 0:
        return 1.0 if difference else level
    shift = difference / deviation * math.sqrt(pairs)
    bound = student_quantile(1 - level / 2, pairs - 1)

    def rejected(scale: float) -> float:
        return _NORMAL.cdf(shift - bound * scale) + _NORMAL.cdf(-shift - bound * scale)

    return _over_scales(rejected, pairs - 1)


def equivalence_power(margin: float, deviation: float, pairs: int, level: float) -> float:
    """The probability that both one-sided tests pass when the true difference is 0."""
    if deviation == 0:
        return 1.0
    width = margin / deviation * math.sqrt(pairs)
    bound = student_quantile(1 - level, pairs - 1)

    def shown(scale: float) -> float:
        return max(0.0, 2 * _NORMAL.cdf(width - bound * scale) - 1)

    return _over_scales(shown, pairs - 1)


def detectable_difference(
    deviation: float, pairs: int, level: float, power: float = POWER
) -> float:
    """The smallest that the paired t-test finds with this power."""
    low, high = 0.0, deviation or 1.0
    if deviation == 0:
        return 0.0
    while difference_power(high, deviation, pairs, level) < power:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        if difference_power(middle, deviation, pairs, level) < power:
            low = middle
        else:
            high = middle
    return high


def bootstrap_interval(
    count: int,
    statistic: Callable[[NDArray[np.intp]], float],
    confidence: float = CONFIDENCE,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns percentile interval of a statistic of `count` independent units. `statistic` gets the
    indices of the drawn units, with repetitions; draws of which it is nan are left out.
    """
    generator = np.random.default_rng(seed)
    drawn = (generator.integers(0, count, count) for _ in range(draws))
    estimates = np.array([statistic(indices) for indices in drawn])
    valid_estimates = estimates[~np.isnan(estimates)]
    if not len(valid_estimates):
        return -math.inf, math.inf
    low, high = np.quantile(valid_estimates, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def student_cdf(t: float, degrees: float) -> float:
    """Returns the distribution function of Student's t."""
    tail = 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return 1 - tail if t > 0 else tail


def student_quantile(probability: float, degrees: float) -> float:
    """Returns the quantile of Student's t, for a probability in (0, 1)."""
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 2.0
    while student_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _two_sided(mean: float, deviation: float, count: int) -> float:
    if deviation == 0:
        return 0.0 if mean else 1.0
    return 2 * (1 - student_cdf(abs(mean) / deviation * math.sqrt(count), count - 1))


def _upper_tail(distance: float, error: float, degrees: int) -> float:
    """The p-value of "the difference is beyond a bound this far away"."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return 1 - student_cdf(distance / error, degrees)


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    matrix: NDArray[np.float64] = np.corrcoef(first, second)
    return float(matrix[0, 1])


_POINTS = 1001  # Simpson's rule; odd
_REACH = 10.0  # standard deviations of the integration range


def _over_scales(probability: Callable[[float], float], degrees: int) -> float:
    # The mean over the distribution of s = estimated / true standard deviation, √(χ²/degrees), by
    # the log of its density.
    spread = _REACH / math.sqrt(2 * degrees)
    scales = np.linspace(max(1e-9, 1 - spread), 1 + spread, _POINTS)
    half = degrees / 2
    logs = (
        math.log(2) + half * math.log(half) - math.lgamma(half)
        + (degrees - 1) * np.log(scales) - half * scales**2
    )  # fmt: skip
    values = np.array([probability(float(scale)) for scale in scales]) * np.exp(logs)
    weights = np.ones(_POINTS)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    step = float(scales[1] - scales[0])
    return min(1.0, float(np.dot(weights, values)) * step / 3)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised, I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # The continued fraction (Abramowitz and Stegun 26.5.8) converges fast below the mean; above it,
    # symmetry helps.
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    # Lentz's method.
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
