"""Invariant 10: a draw depends on seed, trajectory and position alone."""

import numpy as np
import pytest

from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.streams.values import Sampling
from tests.support.engine_samples import ask, open_torch, prompt, run_all, tiny_model

SAMPLING = Sampling(temperature=0.9, tokens_max=70)


def crowd(count: int) -> list:
    return [
        ask(f"other{i}", prompt(2 + i % 7, 100 + i), Sampling(tokens_max=5 + 7 * i % 60))
        for i in range(count)
    ]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_same_tokens_alone_and_in_any_batch(family: str) -> None:
    """Invariant 10."""
    model = tiny_model(family)
    request = ask("mine", prompt(6), SAMPLING)
    alone = run_all(open_torch(model, slots=1), [request])["mine"]
    for slots, before, after in [(2, 3, 3), (5, 9, 2), (16, 0, 20)]:
        others = crowd(before + after)
        engine = open_torch(model, slots=slots, emit_every=11)
        together = run_all(engine, [*others[:before], request, *others[before:]])["mine"]
        assert together.tokens == alone.tokens
        np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-4)


def test_another_seed_or_name_draws_other_tokens() -> None:
    model = tiny_model("llama")
    requests = [ask(name, prompt(6), SAMPLING) for name in ("a", "b")]
    gained = run_all(open_torch(model), requests)
    assert gained["a"].tokens != gained["b"].tokens
    keys = np.array([trajectory_key(seed, "a") for seed in (0, 1, -1, 2**40)], np.uint64)
    assert len(set(uniforms(keys, np.array([3])).tolist())) == 4


def test_uniforms_of_many_positions_equal_those_of_one_and_are_uniform() -> None:
    key = np.array([trajectory_key(7, "a")], np.uint64)
    many = uniforms(key, np.arange(20_000))
    assert many[137] == uniforms(key, np.array([137]))[0]
    assert many.min() >= 0
    assert many.max() < 1
    counts = np.histogram(many, 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4  # χ², 49 degrees of freedom, p = .001
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
