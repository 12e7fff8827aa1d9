"""At T > 0 vLLM keeps the distribution, not the tokens (invariant 10), over moves and updates."""

import pytest
import torch

from rollstream.producers.engines.base import WeightUpdate
from rollstream.streams.values import Sampling
from tests.support.engine_samples import (
    V2,
    Gained,
    ask,
    gather,
    plain_logprobs,
    prompt,
    resumed,
    run_all,
)
from tests.vllm.vllm_samples import open_vllm, vllm_model

pytestmark = pytest.mark.long
CRITICAL = 42.3  # χ² with 18 degrees of freedom, p = .001
COUNT = 3_000


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def test_what_is_drawn_after_a_move_and_an_update_follows_the_model() -> None:
    """The first token of each under one version, the second elsewhere under the next: if a move
    sampled with the earlier random numbers, the second would follow the first.
    """
    old, new = vllm_model("qwen3", 0), vllm_model("qwen3", 1)
    start, hot = prompt(5), Sampling(temperature=2.0, tokens_max=2)
    asked = {f"t{i}": ask(f"t{i}", start, hot) for i in range(COUNT)}
    engine, gained = open_vllm(old, slots=500, context_max=32, emit_every=1), dict[str, Gained]()
    for request in asked.values():
        engine.submit(request)
    while engine.running():
        gather(gained, engine.poll(0.0))
        for name in [name for name in engine.running() if name in gained]:
            rest = engine.abort(name)
            gather(gained, [rest] if rest else [])
    firsts = {name: mine.tokens[0] for name, mine in gained.items()}
    wanted = (plain_logprobs(old, start.tolist())[-1] / 2).softmax(-1).double()
    assert chi_square(list(firsts.values()), wanted) < CRITICAL
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    cut = {name: Gained(mine.tokens[:1], mine.logprobs[:1]) for name, mine in gained.items()}
    moved = run_all(engine, [resumed(asked[name], cut[name]) for name in asked])
    for first in sorted(set(firsts.values()))[:4]:
        seconds = [moved[name].tokens[0] for name in asked if firsts[name] == first]
        rows = plain_logprobs(new, [*start.tolist(), first])[-1]
        assert chi_square(seconds, (rows / 2).softmax(-1).double()) < CRITICAL


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    engine = open_vllm(vllm_model("qwen3"))
    names = ["a", "b"]
    requests = [ask(name, prompt(5), Sampling(tokens_max=40)) for name in names]
    once = run_all(engine, requests)
    again = run_all(engine, requests)
    assert [once[name].tokens for name in names] == [again[name].tokens for name in names]
    assert once["a"].tokens != once["b"].tokens
