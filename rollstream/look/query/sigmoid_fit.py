"""Fits a reward curve by a saturating sigmoid in the spent compute, as in Khatri et al., "The Art
of Scaling Reinforcement Learning Compute for LLMs" (2025, ScaleRL):

    R(C) = R0 + (A − R0) / (1 + (Cmid / C)^B)

R0 is the reward at the start, A the asymptote, Cmid the compute of half of the gain, B the
steepness.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollstream.look.query.intervals import CONFIDENCE, student_quantile

POINTS_MIN = 8
"""Fewer would leave four parameters fewer than four degrees of freedom."""
_STEEPNESS = (0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 8.0)
_MIDPOINTS = 24  # per grid, from the smallest compute to `_BEYOND` times the largest
_BEYOND = 10.0
_ROUNDS = 200
_CORRELATION_MAX = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An end is infinite where the points do not bound the parameter."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SigmoidFit:
    """`residual` is the standard deviation of the points around the curve, `correlation` that of
    neighbouring residuals. `is_determined` is False if the asymptote's interval is wider than the
    points' gain, or Cmid is beyond the largest compute.
    """

    start: Estimate
    asymptote: Estimate
    steepness: Estimate
    midpoint: Estimate
    points: int
    residual: float
    correlation: float
    confidence: float
    is_determined: bool

    def at(self, compute: float) -> float:
        """The fitted reward after this much compute."""
        theta = [self.start.value, self.asymptote.value]
        theta += [math.log(self.steepness.value), math.log(self.midpoint.value)]
        return float(_curve(np.array(theta), np.array([compute], np.float64))[0])


def fit_sigmoid(
    compute: Sequence[float], reward: Sequence[float], confidence: float = CONFIDENCE
) -> SigmoidFit | None:
    """Fits the sigmoid to points in the order of their compute (at least 0, in any unit); None for
    fewer than `POINTS_MIN`, or where all rewards are equal.
    """
    c, r = np.array(compute, np.float64), np.array(reward, np.float64)
    assert len(c) == len(r), "a reward for each point"
    if len(c) < POINTS_MIN or not np.ptp(r) or not np.any(c > 0):
        return None
    theta = _refined(_best_of_grid(c, r), c, r)
    residuals = r - _curve(theta, c)
    freedom = len(c) - len(theta)
    variance = float(residuals @ residuals) / freedom
    correlation = _neighbours(residuals)
    # Residuals of one run are not independent: their covariance grows by (1 + ρ)/(1 − ρ).
    rho = min(max(correlation, 0.0), _CORRELATION_MAX)
    slopes = _slopes(theta, c)
    errors = _errors(slopes.T @ slopes, variance * (1 + rho) / (1 - rho))
    reach = student_quantile((1 + confidence) / 2, freedom) * errors
    start, asymptote, steepness, midpoint = zip(theta, theta - reach, theta + reach, strict=True)
    return SigmoidFit(
        Estimate(*map(float, start)),
        Estimate(*map(float, asymptote)),
        Estimate(*map(_exp, steepness)),
        Estimate(*map(_exp, midpoint)),
        len(c),
        math.sqrt(variance),
        correlation,
        confidence,
        bool(2 * reach[1] < np.ptp(r) and _exp(theta[3]) < c.max()),
    )


def _curve(theta: Floats, compute: Floats) -> Floats:
    """R(C) for theta = (R0, A, log B, log Cmid)."""
    risen = _risen(theta[2], theta[3], compute)
    return theta[0] + (theta[1] - theta[0]) * risen


def _risen(log_steepness: float, log_midpoint: float, compute: Floats) -> Floats:
    """The share of the gain that is made, 1 / (1 + (Cmid/C)^B); 0 at no compute."""
    with np.errstate(divide="ignore"):
        logs = math.exp(log_steepness) * (log_midpoint - np.log(compute))
    return 1 / (1 + np.exp(np.clip(logs, -500, 500)))


def _slopes(theta: Floats, compute: Floats) -> Floats:
    """Returns derivatives of the curve by the four parameters, one row per point."""
    risen = _risen(theta[2], theta[3], compute)
    bend = (theta[1] - theta[0]) * risen * (1 - risen) * math.exp(theta[2])
    positive = np.where(compute > 0, compute, 1.0)
    by_log_steepness = np.where(compute > 0, bend * (np.log(positive) - theta[3]), 0.0)
    return np.stack([1 - risen, risen, by_log_steepness, -bend], axis=1)


def _best_of_grid(compute: Floats, reward: Floats) -> Floats:
    smallest = float(compute[compute > 0].min())
    midpoints = np.geomspace(smallest, _BEYOND * float(compute.max()), _MIDPOINTS)
    best, theta = math.inf, np.zeros(4)
    for steepness in _STEEPNESS:
        for midpoint in midpoints:
            risen = _risen(math.log(steepness), math.log(midpoint), compute)
            # For given B and Cmid the curve is linear in R0 and A, so both are solved for exactly.
            design = np.stack([1 - risen, risen], axis=1)
            ends = np.linalg.lstsq(design, reward, rcond=None)[0]
            error = float(np.sum((reward - design @ ends) ** 2))
            if error < best:
                best = error
                theta = np.array([*ends, math.log(steepness), math.log(midpoint)])
    return theta


def _refined(theta: Floats, compute: Floats, reward: Floats) -> Floats:
    # Levenberg's and Marquardt's method.
    damping = 1e-3
    error = float(np.sum((reward - _curve(theta, compute)) ** 2))
    for _ in range(_ROUNDS):
        slopes = _slopes(theta, compute)
        normal, gradient = slopes.T @ slopes, slopes.T @ (reward - _curve(theta, compute))
        damped = normal + damping * np.diag(np.diag(normal) + 1e-12)
        moved = theta + np.linalg.solve(damped, gradient)
        moved[2] = np.clip(moved[2], math.log(0.05), math.log(50.0))
        after = float(np.sum((reward - _curve(moved, compute)) ** 2))
        if after < error:
            gained, theta, error, damping = error - after, moved, after, damping / 4
            if gained <= 1e-14 * (error + 1e-300):
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return theta


def _errors(information: Floats, variance: float) -> Floats:
    if np.linalg.cond(information) > 1e14:
        # The points do not determine the parameters.
        return np.full(len(information), math.inf)
    return np.sqrt(np.maximum(np.diag(np.linalg.inv(information)) * variance, 0.0))


def _neighbours(residuals: Floats) -> float:
    total = float(residuals @ residuals)
    return float(residuals[:-1] @ residuals[1:]) / total if total else 0.0


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
