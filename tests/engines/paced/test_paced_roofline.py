"""Step times from batch and KV, B_max, and constants recovered from measured steps."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.build import roofline_from
from rollstream.producers.engines.paced_settings import RooflineSettings
from rollstream.producers.engines.profile import (
    EngineProfile,
    StepTiming,
    fit_profile,
    fit_roofline,
    read_profile,
    relative_errors,
    write_profile,
)
from rollstream.producers.engines.roofline import (
    NEARLY_FREE,
    Roofline,
    batch_max,
    roofline_of_hardware,
)

SECONDS = st.floats(1e-6, 1e-1)
ROOFLINES = st.builds(
    Roofline, SECONDS, st.floats(1e-9, 1e-5), SECONDS, SECONDS, SECONDS, st.booleans()
)


def test_a_step_reads_the_weights_and_the_cache_beside_its_arithmetic() -> None:
    roofline = roofline_of_hardware(15e9, 3e12, 60_000, 15e9, 600e12, 1e-3)
    assert roofline.step_s(1, 0) == pytest.approx(5e-3 + 1e-3)
    assert roofline.step_s(64, 100_000) == pytest.approx(5e-3 + 2e-3 + 1e-3)
    assert roofline.step_s(400, 0) == pytest.approx(400 * 25e-6 + 1e-3)  # arithmetic binds


@given(ROOFLINES, st.integers(1, 300), st.integers(0, 10**6), st.integers(1, 50))
def test_many_steps_end_where_one_after_the_other_does(
    roofline: Roofline, rows: int, kv: int, steps: int
) -> None:
    one_by_one = np.cumsum([roofline.step_s(rows, kv + rows * n) for n in range(steps)])
    np.testing.assert_allclose(roofline.ends_s(rows, kv, steps), one_by_one, rtol=1e-9)


@given(ROOFLINES, st.integers(1, 4096))
def test_b_max_is_the_last_batch_that_is_nearly_free(roofline: Roofline, slots: int) -> None:
    most, limit = batch_max(roofline, slots), NEARLY_FREE * roofline.step_s(1, 0)
    assert 1 <= most <= slots
    assert most == 1 or roofline.step_s(most, 0) <= limit
    assert most == slots or roofline.step_s(most + 1, 0) > limit


def measured(roofline: Roofline, noise: float = 0.0) -> list[StepTiming]:
    draw = np.random.default_rng(3)
    return [
        StepTiming(
            rows,
            rows * length,
            roofline.step_s(rows, rows * length) * (1 + noise * draw.normal()),
            length,
            roofline.prefill_s(length),
        )
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        for length in (100, 1_000, 4_000)
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1e-3, 1e-2), st.floats(1e-10, 1e-8), st.floats(1e-5, 1e-4), st.floats(0, 5e-3),
    st.booleans(),
)  # fmt: skip
def test_the_fit_finds_the_constants_of_exact_steps(
    weights_s: float, kv_s: float, row_s: float, overhead_s: float, overlapping: bool
) -> None:
    real = Roofline(weights_s, kv_s, row_s, overhead_s, 1e-5, overlapping)
    found = fit_roofline(measured(real), overlapping)
    assert relative_errors(found, measured(real)).max() < 0.02
    assert found.prefill_token_s == pytest.approx(1e-5)


def test_noise_shows_in_the_error_of_the_fit_and_the_kind_is_found() -> None:
    for overlapping in (True, False):
        real = Roofline(4e-3, 2e-9, 5e-5, 1e-3 * overlapping, 1e-5, overlapping)
        profile = fit_profile("torch", "m", 512, 4096, measured(real, noise=0.02))
        assert profile.roofline.overlapping == overlapping
        assert 0.001 < profile.error < 0.05
        assert profile.batch_max == pytest.approx(batch_max(real, 512), rel=0.15)


def test_a_profile_is_read_back_and_stands_for_the_paced_constants(tmp_path: Path) -> None:
    roofline = Roofline(1e-3, 1e-8, 1e-5, 1e-4, 1e-5, overlapping=False)
    path = tmp_path / "profiles" / "torch-m.json"
    profile = EngineProfile("torch", "m", "cpu", 64, 512, roofline, 12, 0.05, 0.2, 30)
    write_profile(path, profile)
    assert read_profile(path) == profile
    assert roofline_from(RooflineSettings(profile=str(path))) == roofline


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"engine": 3}', "\x00\x01", "[" * 100_000])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="is no profile"):
        read_profile(path)
