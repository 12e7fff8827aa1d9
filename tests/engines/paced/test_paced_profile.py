"""A profile of the real engine: measured, written, and reported by rollouts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.profile import (
    EngineProfile,
    TimedEngine,
    fit_profile,
    model_key,
    profile_path,
    read_profile,
    write_profile,
)
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.roles.rollout import run_profile
from testbed.repository import ROOT
from tests.support.engine_samples import SIZES, open_torch, tiny_model

SMALL = ["rollouts.slots=4", "rollouts.context_max=64", "sampling.tokens_max=32"]


def test_every_batch_at_every_length_is_measured_and_leaves_the_engine_empty() -> None:
    engine = open_torch(tiny_model("qwen3"), slots=5, context_max=96)
    points = list(TimedEngine(engine, 5, 96, SIZES["vocab_size"]).points())
    assert {point.rows for point in points} == {1, 2, 4, 5}
    assert len(points) == len({(point.rows, point.kv_tokens) for point in points}) == 16
    assert all(point.seconds > 0 and point.kv_tokens < point.rows * 96 for point in points)
    assert engine.running() == []
    profile = fit_profile("torch", "m", 5, 96, points)
    assert 1 <= profile.batch_max <= 5
    assert profile.points == 16
    assert profile.error <= profile.error_max


def test_the_command_writes_what_rollouts_of_the_run_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "profile",
        str(ROOT / "examples" / "quickstart.toml"),
        "--run",
        str(tmp_path),
        "--json",
    ]
    for one in SMALL:
        words += ["--set", one]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"file", "batch_max", "error", "roofline", "measured"} <= set(printed)
    c = load(ROOT / "examples" / "quickstart.toml", SMALL, {})
    shape = Qwen3Config(**dict[str, Any](c.model.config), vocab_size=18)
    found = run_profile(c, tmp_path, shape)
    assert found is not None
    assert found.batch_max == printed["batch_max"]
    assert list(tmp_path.iterdir()) == [tmp_path / "profiles"]


def test_a_profile_of_another_model_is_refused_where_it_is_named(tmp_path: Path) -> None:
    roofline = read_any(tmp_path)
    c = load(ROOT / "examples" / "quickstart.toml", [f"rollouts.profile={roofline}"], {})
    with pytest.raises(ConfigurationError, match="is a profile of engine torch and model other"):
        run_profile(c, tmp_path, Qwen3Config(**SIZES))
    unnamed = load(ROOT / "examples" / "quickstart.toml", (), {})
    assert run_profile(unnamed, tmp_path, Qwen3Config(**SIZES)) is None


def read_any(folder: Path) -> Path:
    from rollstream.producers.engines.roofline import Roofline

    path = folder / "other.json"
    write_profile(
        path, EngineProfile("torch", "other", "cpu", 4, 64, Roofline(1, 1, 1), 2, 0, 0, 1)
    )
    assert read_profile(path).batch_max == 2
    return path


def test_a_key_is_of_the_shape_and_not_of_the_weights() -> None:
    one, other = tiny_model("qwen3", 0).config, tiny_model("qwen3", 1).config
    assert model_key(one, {}) == model_key(other, {})
    assert model_key(one, {}) != model_key(tiny_model("gpt2").config, {})


def test_a_profile_is_used_for_the_engine_settings_that_it_was_measured_with(
    tmp_path: Path,
) -> None:
    """Quantised weights, another type and more cards have other step times."""
    model, keys = Qwen3Config(**SIZES), set[str]()
    plain = ["rollouts.engine=vllm"]
    for changed in (
        [],
        ["rollouts.vllm.args.quantization=fp8"],
        ["rollouts.vllm.dtype=bfloat16"],
        ["rollouts.vllm.tensor_parallel=2"],
    ):
        c = load(ROOT / "examples" / "quickstart.toml", [*plain, *changed], {})
        keys.add(model_key(model, c.rollouts.kind.timed_settings(c.rollouts)))
    assert len(keys) == 4
    same = load(ROOT / "examples" / "quickstart.toml", [*plain, "rollouts.vllm.kv_gib=1"], {})
    assert model_key(model, same.rollouts.kind.timed_settings(same.rollouts)) in keys
    assert model_key(model, {}) in keys
    assert profile_path(Path("x"), "torch", "k") == Path("x/profiles/torch-k.json")


def test_an_engine_without_a_model_has_nothing_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", str(ROOT / "examples" / "longtail.toml"), "--run", str(tmp_path)]
    assert main(words) == 2
    assert "nothing to measure" in capsys.readouterr().err
