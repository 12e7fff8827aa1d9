"""Taking new weights: spans, what the cache keeps, and what a failed update leaves."""

import pytest
import torch
from engine_samples import (
    V1,
    V2,
    Gained,
    ask,
    chosen_logprobs,
    gather,
    open_torch,
    prompt,
    run_all,
    tiny_model,
)
from transformers import DynamicCache, PreTrainedModel

from producers.engines.base import Update
from producers.engines.torch_engine import TorchEngine
from streams.errors import EngineRefused
from streams.records import Sampling, Tokens


def half_way(engine: TorchEngine, count: int = 12) -> dict[str, Gained]:
    """One trajectory `t` of 40 greedy tokens, stopped in the middle."""
    engine.submit(ask("t", prompt(6), Sampling(temperature=0, tokens_max=40)))
    gained: dict[str, Gained] = {}
    while engine.stats().tokens < count:
        gather(gained, engine.poll(0.0))
    return gained


def greedy_over_old_cache(
    old: PreTrainedModel, new: PreTrainedModel, start: Tokens, before: int, after: int
) -> list[int]:
    """`before` tokens by the old model, `after` by the new one on the old one's cache."""
    cache, tokens = DynamicCache(), start.tolist()
    step = torch.tensor([tokens])
    for count in range(before + after):
        model = old if count < before else new
        with torch.inference_mode():
            logits = model(step, past_key_values=cache, use_cache=True).logits
        tokens.append(int(logits[0, -1].argmax()))
        step = torch.tensor([tokens[-1:]])
    return tokens[len(start) :]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_in_flight_keeps_the_cache_and_stamps_spans(family: str) -> None:
    """Invariant 3; the reference goes on with new weights over the old weights' cache."""
    old, new = tiny_model(family, 0), tiny_model(family, 1)
    engine = open_torch(old, emit_every=5)
    gained = half_way(engine)
    engine.update(Update(V2, new.state_dict()), "in_flight")
    while engine.running():
        gather(gained, engine.poll(10.0))
    mine = gained["t"]
    assert mine.tokens == greedy_over_old_cache(old, new, prompt(6), 12, 28)
    assert mine.spans == [(V1, 12), (V2, 28)]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_in_flight_recompute_equals_a_full_prefill_under_the_new_weights(family: str) -> None:
    old, new = tiny_model(family, 0), tiny_model(family, 1)
    engine = open_torch(old)
    gained = half_way(engine)
    engine.update(Update(V2, new.state_dict()), "in_flight_recompute")
    while engine.running():
        gather(gained, engine.poll(10.0))
    mine = gained["t"]
    wanted = chosen_logprobs(new, prompt(6), mine.tokens)
    torch.testing.assert_close(torch.tensor(mine.logprobs[12:]), wanted[12:], atol=1e-4, rtol=0)
    assert mine.spans == [(V1, 12), (V2, 28)]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("fault", ["missing", "shape", "nan"])
def test_a_failed_update_serves_nothing_until_one_succeeds(family: str, fault: str) -> None:
    engine, new = open_torch(tiny_model(family)), tiny_model(family, 1)
    gained = half_way(engine)
    bad = dict(new.state_dict())
    name = next(name for name in bad if "mlp" in name and name.endswith("weight"))
    if fault == "missing":
        del bad[name]
    else:
        bad[name] = bad[name][:-1] if fault == "shape" else bad[name] * torch.nan
    with pytest.raises(EngineRefused, match=name):
        engine.update(Update(V2, bad), "in_flight")
    assert engine.poll(0.1) == []
    assert engine.version == V1
    engine.update(Update(V2, new.state_dict()), "in_flight")
    while engine.running():
        gather(gained, engine.poll(10.0))
    assert gained["t"].spans == [(V1, 12), (V2, 28)]


def test_a_prefilled_prompt_is_not_reused_across_versions() -> None:
    """A prefix cache is keyed by version: a sibling after the update gets a new prefill."""
    old, new = tiny_model("qwen3", 0), tiny_model("qwen3", 1)
    engine = open_torch(old)
    half_way(engine)
    engine.update(Update(V2, new.state_dict()), "in_flight")
    sibling = run_all(engine, [ask("u", prompt(6), Sampling(tokens_max=30))])["u"]
    wanted = chosen_logprobs(new, prompt(6), sibling.tokens)
    torch.testing.assert_close(torch.tensor(sibling.logprobs), wanted, atol=1e-4, rtol=0)


def test_bf16_tensors_are_served_as_their_fp32_values() -> None:
    rounded = tiny_model("llama").to(torch.bfloat16)
    tensors = dict(rounded.state_dict())
    engine = TorchEngine(rounded.config, tensors, V1, 2, 64)
    mine = run_all(engine, [ask("t", prompt(6), Sampling(tokens_max=20))])["t"]
    wanted = chosen_logprobs(rounded.float(), prompt(6), mine.tokens)
    torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)
