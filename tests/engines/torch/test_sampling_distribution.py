"""Sampled tokens follow the processed probabilities."""

import numpy as np
import pytest
import torch

from rollstream.producers.engines.torch.sampling import (
    draw_tokens,
    inverse_cdf,
    plan_sampling,
    processed_logprobs,
)
from rollstream.streams.values import Sampling
from tests.support.engine_samples import (
    ask,
    open_torch,
    plain_logprobs,
    prompt,
    run_all,
    tiny_model,
)

CPU = torch.device("cpu")


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    kept = probabilities > 0
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert not counts[~kept].any()
    expected = probabilities[kept] * len(tokens)
    return float(((counts[kept] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_k=9), Sampling(temperature=0.7, top_p=0.8)],
    ids=["plain", "top_k", "top_p"],
)
def test_drawn_tokens_follow_the_processed_probabilities(sampling: Sampling) -> None:
    """χ² over 40 000 draws; 18 degrees of freedom at most, p = .001."""
    logits = torch.randn(1, 19, generator=torch.manual_seed(1))
    plan = plan_sampling([sampling], CPU)
    uniform = torch.rand(40_000, 1, dtype=torch.float64, generator=torch.manual_seed(2))
    tokens, logprobs = draw_tokens(logits.expand(40_000, -1), plan, uniform)
    probabilities = processed_logprobs(logits, plan)[0].double().exp()
    assert chi_square(tokens[:, 0], probabilities) < 42.3
    assert torch.equal(logprobs[:, 0], processed_logprobs(logits, plan)[0][tokens[:, 0]])


def test_first_tokens_of_many_trajectories_follow_the_model() -> None:
    """The whole engine: χ² over 4 000 trajectories of one prompt, 18 degrees of freedom."""
    model = tiny_model("qwen3")
    start = prompt(5)
    requests = [ask(f"t{i}", start, Sampling(tokens_max=1)) for i in range(4_000)]
    gained = run_all(open_torch(model, slots=500), requests)
    tokens = torch.tensor([mine.tokens[0] for mine in gained.values()])
    assert chi_square(tokens, plain_logprobs(model, start.tolist())[-1].double().exp()) < 42.3


def test_rows_of_different_parameters_are_drawn_as_if_alone() -> None:
    kinds = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(temperature=0.5, top_k=3),
        Sampling(top_p=0.6),
        Sampling(temperature=2.0, top_k=5, top_p=0.9),
    ]
    logits = torch.randn(5, 19, generator=torch.manual_seed(3))
    uniform = torch.rand(5, 1, dtype=torch.float64, generator=torch.manual_seed(4))
    tokens, logprobs = draw_tokens(logits, plan_sampling(kinds, CPU), uniform)
    for row, kind in enumerate(kinds):
        at = slice(row, row + 1)
        token, logprob = draw_tokens(logits[at], plan_sampling([kind], CPU), uniform[at])
        assert token == tokens[row]
        torch.testing.assert_close(logprob[0], logprobs[row])


def test_no_uniform_reaches_an_impossible_token() -> None:
    logprobs = torch.tensor([[-torch.inf, 0.25, 0.75, -torch.inf]])
    logprobs[:, 1:3] = logprobs[:, 1:3].log()
    edges = torch.tensor([[0.0], [0.25], [1 - 2.0**-53]], dtype=torch.float64)
    assert inverse_cdf(logprobs.expand(3, -1), edges)[:, 0].tolist() == [1, 2, 2]


def test_greedy_log_probability_is_that_of_temperature_one() -> None:
    logits = torch.randn(1, 19, generator=torch.manual_seed(5))
    plan = plan_sampling([Sampling(temperature=0)], CPU)
    token, logprob = draw_tokens(logits, plan, torch.zeros(1, 1, dtype=torch.float64))
    assert int(token) == int(logits.argmax())
    np.testing.assert_allclose(float(logprob), float(logits.log_softmax(-1).max()), rtol=1e-6)
