"""Weight updates: spans, the KV cache, and the state after a failed update."""

import pytest
import torch
from transformers import PreTrainedModel

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import Engine, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.streams.values import Sampling
from testbed.update_reference import over_old_cache
from tests.support.engine_samples import (
    V1,
    V2,
    ask,
    chosen_logprobs,
    half_way,
    open_torch,
    prompt,
    run_all,
    tiny_model,
    to_the_end,
)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_in_flight_keeps_the_cache_and_stamps_spans(family: str) -> None:
    """Invariant 3."""
    old, new = tiny_model(family, 0), tiny_model(family, 1)
    check_in_flight(open_torch(old, emit_every=5), old, new)


def check_in_flight(engine: Engine, old: PreTrainedModel, new: PreTrainedModel) -> None:
    """The reference continues with new weights over the old weights' cache."""
    gained = half_way(engine)
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    mine = to_the_end(engine, gained)
    greedy, logprobs = over_old_cache(old, new, prompt(6), mine.tokens, 12)
    assert mine.tokens == greedy
    torch.testing.assert_close(torch.tensor(mine.logprobs), logprobs, atol=1e-4, rtol=0)
    assert mine.spans == [(V1, 12), (V2, 28)]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_in_flight_recompute_equals_a_full_prefill_under_the_new_weights(family: str) -> None:
    check_recompute(open_torch(tiny_model(family, 0)), tiny_model(family, 1))


def check_recompute(engine: Engine, new: PreTrainedModel) -> None:
    gained = half_way(engine)
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight_recompute")
    mine = to_the_end(engine, gained)
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
        engine.update(WeightUpdate(V2, bad), "in_flight")
    assert engine.poll(0.1) == []
    assert engine.version == V1
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    assert to_the_end(engine, gained).spans == [(V1, 12), (V2, 28)]


def test_a_prefilled_prompt_is_not_reused_across_versions() -> None:
    """A prefix cache is keyed by version: a sibling after the update gets a new prefill."""
    old, new = tiny_model("qwen3", 0), tiny_model("qwen3", 1)
    engine = open_torch(old)
    half_way(engine)
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    sibling = run_all(engine, [ask("u", prompt(6), Sampling(tokens_max=30))])["u"]
    wanted = chosen_logprobs(new, prompt(6), sibling.tokens)
    torch.testing.assert_close(torch.tensor(sibling.logprobs), wanted, atol=1e-4, rtol=0)


def test_bf16_tensors_are_served_as_their_fp32_values() -> None:
    rounded = tiny_model("llama").to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    tensors = dict(rounded.state_dict())
    engine = TorchEngine(rounded.config, tensors, V1, EngineOptions(2, 64))
    mine = run_all(engine, [ask("t", prompt(6), Sampling(tokens_max=20))])["t"]
    wanted = chosen_logprobs(rounded.float(), prompt(6), mine.tokens)
    torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)
