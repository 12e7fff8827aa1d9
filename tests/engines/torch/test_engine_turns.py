"""Groups, turns, aborts: when each is prefilled, and which tokens are emitted."""

import numpy as np
import pytest
import torch

from rollstream.producers.engines.base import WeightUpdate
from rollstream.streams.values import Sampling
from tests.support.engine_samples import (
    ask,
    chosen_logprobs,
    open_torch,
    prompt,
    run_all,
    tiny_model,
    to_first_stop,
)

TURNS = Sampling(tokens_max=60, stop=(3, 5, 11))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_siblings_share_a_prefill_and_differ_in_nothing_else(family: str) -> None:
    """In one poll or in a later one, a copied prompt gives the same as a prefill of its own."""
    model = tiny_model(family)
    requests = [ask(f"t{i}", prompt(9), Sampling(tokens_max=20)) for i in range(6)]
    engine = open_torch(model, slots=3)
    shared = run_all(engine, requests[:3]) | run_all(engine, requests[3:])
    for request in requests:
        own = run_all(open_torch(model), [request])[request.trajectory]
        assert shared[request.trajectory].tokens == own.tokens
        np.testing.assert_allclose(
            shared[request.trajectory].logprobs, own.logprobs, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_appended_environment_tokens_equal_a_forward_from_scratch(family: str) -> None:
    model = tiny_model(family)
    engine = open_torch(model, slots=2, context_max=200)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    engine.submit(ask("other", prompt(3), Sampling(tokens_max=150)))
    tokens = prompt(6).tolist()
    for turn in range(3):
        mine = to_first_stop(engine, "t")
        wanted = chosen_logprobs(model, np.array(tokens, np.uint32), mine.tokens)
        torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)
        reply = prompt(4 + turn, 50 + turn)
        tokens += mine.tokens + reply.tolist()
        engine.append("t", reply)
    assert "t" in engine.running()


def test_a_parked_trajectory_continues_on_a_cache_of_the_new_weights() -> None:
    old, new = tiny_model("qwen3", 0), tiny_model("qwen3", 1)
    engine = open_torch(old)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    first = to_first_stop(engine, "t")
    engine.update(WeightUpdate(engine.version, new.state_dict()), "in_flight_recompute")
    engine.append("t", prompt(4, 9))
    second = run_all(engine)["t"]
    start = np.array([*prompt(6), *first.tokens, *prompt(4, 9)], np.uint32)
    wanted = chosen_logprobs(new, start, second.tokens)
    torch.testing.assert_close(torch.tensor(second.logprobs), wanted, atol=1e-4, rtol=0)
