"""Drawn lengths have the configured distribution, are alike for one prompt, and the same wherever
they are drawn.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.build import lengths_from
from rollstream.producers.engines.paced.lengths import (
    LengthSampler,
    LogNormal,
    LogNormalMixture,
    read_trace,
)
from rollstream.producers.engines.paced_settings import LengthPartSettings, LengthSettings
from tests.support.engine_samples import prompt

LONGTAIL = LengthSampler(LogNormal(1_600, 16_000), 0.7)


def drawn(lengths: LengthSampler, prompts: int, each: int) -> np.ndarray:
    """[prompt, sample]"""
    asked = [prompt(12, seed) for seed in range(prompts)]
    return np.array(
        [[lengths.draw(0, p, f"{n}.{i}", 12) for i in range(each)] for n, p in enumerate(asked)]
    )


def test_the_median_and_the_hundredth_are_what_was_asked_for() -> None:
    found = drawn(LengthSampler(LogNormal(1_600, 16_000), 0.0), 40, 200)
    assert np.median(found) == pytest.approx(1_600, rel=0.08)
    assert np.quantile(found, 0.99) == pytest.approx(16_000, rel=0.2)


@pytest.mark.parametrize("correlation", [0.0, 0.7, 1.0])
def test_answers_to_one_prompt_are_as_alike_as_configured(correlation: float) -> None:
    found = np.log(drawn(LengthSampler(LogNormal(1_600, 16_000), correlation), 400, 2))
    assert np.corrcoef(found.T)[0, 1] == pytest.approx(correlation, abs=0.1)


def test_a_later_pass_draws_other_lengths_of_the_same_prompt() -> None:
    asked = prompt(12)
    passes = [LONGTAIL.draw(0, asked, f"{group}.0", 12) for group in (3, 195, 387)]
    assert len(set(passes)) == 3
    assert [LONGTAIL.draw(0, asked, f"{group}.0", 12) for group in (3, 195, 387)] == passes
    assert LONGTAIL.draw(1, asked, "3.0", 12) != passes[0]


@given(st.floats(0.001, 0.999))
def test_a_mixture_splits_its_answers_by_weight(share: float) -> None:
    mixture = LogNormalMixture(((3.0, LogNormal(100, 200)), (1.0, LogNormal(5_000, 9_000))))
    length = mixture.quantile(share)
    below = sum(weight * part.share(length) for weight, part in mixture.parts) / 4
    assert below == pytest.approx(share, abs=1e-6)


def test_settings_describe_one_shape_a_mixture_or_a_trace(tmp_path: Path) -> None:
    parts = (LengthPartSettings(median=10, p99=20), LengthPartSettings(median=900, p99=990))
    assert isinstance(lengths_from(LengthSettings(parts=parts)).distribution, LogNormalMixture)
    assert lengths_from(LengthSettings()).distribution == LogNormal(1_600, 16_000)
    trace = tmp_path / "lengths.txt"
    trace.write_text("# of last week's run\n30\n10\n\n20\n")
    found = drawn(lengths_from(LengthSettings(trace=str(trace), correlation=0.0)), 10, 30)
    assert set(found.ravel()) == {10, 20, 30}


@pytest.mark.parametrize(
    ("text", "named"),
    [("12\nlong\n", "line 2 .*'long'"), ("", "no lengths"), ("0\n", "line 1"), ("nan\n", "line 1")],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        read_trace(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(str(tmp_path / "nothing"))
