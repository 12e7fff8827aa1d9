"""Student's t, paired differences, equivalence, power and the bootstrap, each against a closed
form, a numerical integral, a published value or a simulation.
"""

import math
from itertools import product

import numpy as np
import pytest

from rollstream.look.query.intervals import (
    bootstrap_interval,
    detectable_difference,
    difference_power,
    equivalence,
    equivalence_power,
    mean_interval,
    paired_difference,
    student_cdf,
    student_quantile,
)

SLEEP_A = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_B = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
"""Hours of additional sleep of ten patients under two drugs: the data on which Student (1908)
showed his test.
"""


def integrated(t: float, degrees: float) -> float:
    """The distribution function, by Simpson's rule over the density from 0 to t."""
    x = np.linspace(0.0, t, 20001)
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    density = math.exp(log) / math.sqrt(degrees * math.pi)
    y = density * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    return 0.5 + float((y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum()) * x[1] / 3)


@pytest.mark.parametrize("t", [-3.0, -0.2, 0.0, 0.4, 1.0, 2.5, 20.0])
def test_the_distribution_is_that_of_closed_forms(t):
    one, two = 0.5 + math.atan(t) / math.pi, 0.5 + t / (2 * math.sqrt(2 + t * t))
    assert student_cdf(t, 1) == pytest.approx(one, abs=1e-13)
    assert student_cdf(t, 2) == pytest.approx(two, abs=1e-13)


@pytest.mark.parametrize(("t", "degrees"), list(product([0.3, 1.9, 6.0], [3, 4.5, 9, 199])))
def test_the_distribution_is_the_integral_of_the_density(t, degrees):
    assert student_cdf(t, degrees) == pytest.approx(integrated(t, degrees), abs=1e-10)


@pytest.mark.parametrize(
    ("degrees", "upper"),
    [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227), (120, 1.97993)],
)
def test_quantiles_are_those_of_printed_tables(degrees, upper):
    assert student_quantile(0.975, degrees) == pytest.approx(upper, abs=1e-4)
    assert student_quantile(0.025, degrees) == pytest.approx(-upper, abs=1e-4)


def test_a_paired_difference_is_students_own_example():
    """t = 4.0621 on 9 degrees, p = .002833, 95 % interval .7001 to 2.4599 (as R prints it for its
    data set `sleep`).
    """
    found = paired_difference(SLEEP_A, SLEEP_B)
    assert found.difference == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert found.p == pytest.approx(0.00283289, abs=1e-7)
    assert found.correlation == pytest.approx(0.7951702, abs=1e-6)
    assert found.first == pytest.approx(0.75)


def test_pairs_that_share_their_luck_have_a_narrower_interval():
    random = np.random.default_rng(0)
    luck = random.normal(0, 1, 200)
    a, b = luck + random.normal(0, 0.1, 200), luck + random.normal(0.05, 0.1, 200)
    together = paired_difference(a.tolist(), b.tolist())
    apart = paired_difference(a.tolist(), random.permutation(b).tolist())
    assert together.high - together.low < 0.2 * (apart.high - apart.low)


def test_one_value_has_a_mean_and_no_interval():
    found = mean_interval([0.5])
    assert (found.mean, found.low, found.high) == (0.5, -math.inf, math.inf)
    with pytest.raises(ValueError, match="1 pairs"):
        paired_difference([1.0], [2.0])


def test_equal_pairs_do_not_differ():
    found = paired_difference([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (found.low, found.high, found.p, found.detectable) == (0.0, 0.0, 1.0, 0.0)
    assert equivalence(found, 0.01).is_shown


@pytest.mark.parametrize("margin", [0.5, 1.0, 2.25, 2.5, 4.0])
def test_equivalence_is_two_one_sided_tests(margin):
    """Both tests recomputed: the interval lies within the margin exactly if both reject."""
    found = paired_difference(SLEEP_A, SLEEP_B)
    test = equivalence(found, margin)
    error = found.deviation / math.sqrt(10)
    lower = 1 - integrated_signed((found.difference + margin) / error)
    upper = integrated_signed((found.difference - margin) / error)
    assert test.p == pytest.approx(max(lower, upper), abs=1e-9)
    assert test.is_shown == (max(lower, upper) < 0.05)


def integrated_signed(t: float) -> float:
    return integrated(t, 9) if t >= 0 else 1 - integrated(-t, 9)


def test_power_is_that_of_the_gpower_manual():
    """Faul et al., G*Power 3.1 manual: dz = .5, 34 pairs, two-sided 5 %: .8077775."""
    assert difference_power(0.5, 1.0, 34, 0.05) == pytest.approx(0.8077775, abs=2e-6)
    assert detectable_difference(1.0, 34, 0.05, 0.8077775) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("pairs", [3, 5, 10])
def test_power_is_the_share_of_simulated_experiments(pairs):
    """Within four standard errors of 40 000 experiments."""
    random, count, shift, margin = np.random.default_rng(pairs), 40_000, 1.1, 1.5
    drawn = random.normal(0, 1, (count, pairs))
    error = drawn.std(axis=1, ddof=1) / math.sqrt(pairs)
    t = np.abs(drawn.mean(axis=1) + shift) / error
    rejected = float(np.mean(t > student_quantile(0.975, pairs - 1)))
    assert difference_power(shift, 1.0, pairs, 0.05) == pytest.approx(rejected, abs=0.01)
    ends = np.abs(drawn.mean(axis=1)) + student_quantile(0.95, pairs - 1) * error
    shown = float(np.mean(ends < margin))
    assert equivalence_power(margin, 1.0, pairs, 0.05) == pytest.approx(shown, abs=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        found = mean_interval(random.normal(0.3, 1.0, 5).tolist(), 0.9)
        covered += found.low <= 0.3 <= found.high
    assert covered / 2000 == pytest.approx(0.9, abs=0.03)


def test_the_bootstrap_of_a_mean_is_the_interval_of_the_normal():
    random = np.random.default_rng(2)
    values = random.exponential(1.0, 400)
    low, high = bootstrap_interval(400, lambda drawn: float(values[drawn].mean()))
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_a_bootstrap_without_any_value_has_no_bounds():
    assert bootstrap_interval(4, lambda _: math.nan, draws=5) == (-math.inf, math.inf)
