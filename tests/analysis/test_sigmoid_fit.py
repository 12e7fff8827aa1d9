"""The sigmoid fit: exact on a curve without noise, least squares, honest intervals."""

import math

import numpy as np
import pytest

from rollstream.look.query.sigmoid_fit import POINTS_MIN, SigmoidFit, fit_sigmoid

TRUE = (0.2, 0.85, 1.7, 3e5)  # R0, A, B, Cmid
COMPUTE = np.linspace(0, 2e6, 40)


def curve(compute, start: float, asymptote: float, steepness: float, midpoint: float):
    """The formula of the paper, written again."""
    with np.errstate(divide="ignore"):
        return start + (asymptote - start) / (1 + (midpoint / compute) ** steepness)


def fitted(reward) -> SigmoidFit:
    found = fit_sigmoid(COMPUTE.tolist(), reward.tolist())
    assert found is not None
    return found


def values(fit: SigmoidFit) -> tuple[float, float, float, float]:
    return fit.start.value, fit.asymptote.value, fit.steepness.value, fit.midpoint.value


def test_a_curve_without_noise_gives_its_parameters():
    found = fitted(curve(COMPUTE, *TRUE))
    assert values(found) == pytest.approx(TRUE, rel=1e-5)
    assert found.at(3e5) == pytest.approx((0.2 + 0.85) / 2)
    assert found.is_determined


def test_it_is_the_least_squares_fit():
    """No other parameters have a smaller error: not those of the truth, nor neighbours of it."""
    random = np.random.default_rng(0)
    reward = curve(COMPUTE, *TRUE) + random.normal(0, 0.03, len(COMPUTE))
    best = values(fitted(reward))

    def error(parameters) -> float:
        return float(np.sum((reward - curve(COMPUTE, *parameters)) ** 2))

    assert error(best) <= error(TRUE)
    for _ in range(500):
        near = [one * math.exp(random.normal(0, 0.02)) for one in best]
        assert error(best) <= error(near) + 1e-12


def test_intervals_cover_the_truth_as_often_as_they_say():
    """95 % intervals of the asymptote; 200 curves, so three standard errors are .046."""
    random, covered = np.random.default_rng(1), 0
    for _ in range(200):
        found = fitted(curve(COMPUTE, *TRUE) + random.normal(0, 0.02, len(COMPUTE)))
        covered += found.asymptote.low <= TRUE[1] <= found.asymptote.high
    assert covered / 200 >= 0.9


def test_correlated_residuals_widen_the_intervals():
    random = np.random.default_rng(2)
    noise = random.normal(0, 0.02, len(COMPUTE))
    smooth = np.array([noise[:i][-4:].sum() / 2 for i in range(1, len(noise) + 1)])
    plain, slow = (fitted(curve(COMPUTE, *TRUE) + one) for one in (noise, smooth))
    assert slow.correlation > 0.5

    def width(fit: SigmoidFit) -> float:
        return (fit.asymptote.high - fit.asymptote.low) / fit.residual

    assert width(slow) > 1.5 * width(plain)


def test_a_curve_that_still_rises_does_not_determine_its_asymptote():
    random = np.random.default_rng(3)
    rising = 0.2 + 1e-7 * COMPUTE + random.normal(0, 0.01, len(COMPUTE))
    assert not fitted(rising).is_determined


@pytest.mark.parametrize(
    ("compute", "reward"),
    [([1.0] * 3, [0.1] * 3), (range(20), [0.5] * 20), ([0.0] * 20, range(20))],
)
def test_too_few_or_constant_points_give_no_fit(compute, reward):
    assert fit_sigmoid(list(compute), list(reward)) is None


def test_the_fewest_points_give_a_fit():
    compute = np.geomspace(1, 100, POINTS_MIN)
    found = fit_sigmoid(compute.tolist(), curve(compute, 0.1, 0.9, 2.0, 9.0).tolist())
    assert found is not None
    assert values(found) == pytest.approx((0.1, 0.9, 2.0, 9.0), rel=1e-4)
