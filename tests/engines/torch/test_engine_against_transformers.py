"""Tokens and log-probabilities against transformers' own generation and forward."""

import numpy as np
import pytest
import torch

from rollstream.streams.values import Sampling
from tests.support.engine_samples import (
    FAMILIES,
    ask,
    chosen_logprobs,
    open_torch,
    plain_logprobs,
    prompt,
    run_all,
    tiny_model,
)

LENGTHS = [3, 9, 1, 5, 7, 2, 12, 4, 1]


def greedy(model, tokens, count: int) -> list[int]:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
    )
    return made[0, len(tokens) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_with_ragged_prompts_and_continuous_admission(family: str) -> None:
    model = tiny_model(family)
    engine = open_torch(model, slots=3, emit_every=16)
    requests = [
        ask(f"t{i}", prompt(length, i), Sampling(temperature=0, tokens_max=60 - 5 * i))
        for i, length in enumerate(LENGTHS)
    ]
    gained = run_all(engine, requests)
    for request in requests:
        wanted = greedy(model, request.tokens, request.sampling.tokens_max)
        assert gained[request.trajectory].tokens == wanted
        assert gained[request.trajectory].finish == "length"


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probabilities_equal_a_plain_forward(family: str) -> None:
    model = tiny_model(family)
    requests = [ask(f"t{i}", prompt(n, i), Sampling(tokens_max=50)) for i, n in enumerate(LENGTHS)]
    gained = run_all(open_torch(model), requests)
    for request in requests:
        mine = gained[request.trajectory]
        wanted = chosen_logprobs(model, request.tokens, mine.tokens)
        torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)


def test_processed_log_probabilities_follow_temperature_top_k_and_top_p() -> None:
    model = tiny_model("qwen3")
    sampling = Sampling(temperature=0.7, top_k=6, top_p=0.8, tokens_max=40)
    start = prompt(4)
    mine = run_all(open_torch(model), [ask("t", start, sampling)])["t"]
    rows = plain_logprobs(model, [*start.tolist(), *mine.tokens])[len(start) - 1 : -1] / 0.7
    for row, token, logprob in zip(rows, mine.tokens, mine.logprobs, strict=True):
        kept, order = row.topk(6)
        mass = kept.softmax(-1)
        kept = kept[: int((mass.cumsum(-1) - mass < 0.8).sum())]
        place = order.tolist().index(token)
        assert abs(float(kept.log_softmax(-1)[place]) - logprob) < 1e-4


def test_a_stop_token_ends_a_row_and_is_its_last_token() -> None:
    model = tiny_model("llama")
    start = prompt(5)
    free = greedy(model, start, 40)
    stop = free[7]
    sampling = Sampling(temperature=0, tokens_max=40, stop=(VOCABULARY_END, stop))
    mine = run_all(open_torch(model), [ask("t", start, sampling)])["t"]
    assert mine.tokens == free[: free.index(stop) + 1]
    assert mine.finish == "stop"


VOCABULARY_END = 18


def test_the_context_is_a_length_limit() -> None:
    engine = open_torch(tiny_model("qwen3"), context_max=20)
    mine = run_all(engine, [ask("t", prompt(8), Sampling(tokens_max=500))])["t"]
    assert (len(mine.tokens), mine.finish) == (12, "length")


def test_columns_run_out_and_are_shifted_without_a_trace() -> None:
    """The cache has 256 columns more than the context: some thousand steps shift it often."""
    model = tiny_model("llama")
    engine = open_torch(model, slots=3, context_max=70)
    requests = [
        ask(f"t{i}", prompt(1 + i % 9, i), Sampling(tokens_max=20 + 11 * i % 50)) for i in range(60)
    ]
    gained = run_all(engine, requests)
    assert engine.stats().steps > 3 * 256
    for request in requests:
        mine = gained[request.trajectory]
        wanted = chosen_logprobs(model, request.tokens, mine.tokens)
        torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)
