"""Weight updates on vLLM: against transformers with the old cache and the new weights, in one chunk
and in several, and the state after a failure.
"""

from collections.abc import Iterator, Mapping

import pytest
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.vllm.local import weights
from rollstream.streams.values import Sampling
from testbed.update_reference import over_old_cache
from tests.engines.torch.test_engine_updates import check_in_flight, check_recompute
from tests.support.engine_samples import (
    V1,
    V2,
    ask,
    chosen_logprobs,
    half_way,
    prompt,
    run_all,
    to_the_end,
)
from tests.vllm.vllm_samples import check_two_hundred_updates, open_vllm, vllm_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_in_flight_keeps_the_cache_and_stamps_spans(family: str) -> None:
    """Invariant 3."""
    old, new = vllm_model(family, 0), vllm_model(family, 1)
    check_in_flight(open_vllm(old, emit_every=5), old, new)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_in_flight_recompute_equals_a_full_prefill_under_the_new_weights(family: str) -> None:
    check_recompute(open_vllm(vllm_model(family, 0)), vllm_model(family, 1))


def test_log_probabilities_are_those_after_temperature() -> None:
    model = vllm_model("llama")
    engine = open_vllm(model)
    mine = run_all(engine, [ask("t", prompt(6), Sampling(temperature=0.7, tokens_max=60))])["t"]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt(6).tolist(), *mine.tokens]])).logits[0, 5:-1] / 0.7
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(mine.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["in_flight", "in_flight_recompute"])
def test_a_cached_prompt_is_not_reused_across_versions(mode: str) -> None:
    """Long enough to fill blocks of the cache, which a sibling would hit."""
    old, new = vllm_model("qwen3", 0), vllm_model("qwen3", 1)
    engine = open_vllm(old, context_max=160)
    run_all(engine, [ask("t", prompt(100), Sampling(temperature=0, tokens_max=4))])
    engine.submit(ask("running", prompt(100), Sampling(temperature=0, tokens_max=20)))
    engine.poll(0.0)
    engine.update(WeightUpdate(V2, new.state_dict()), mode)  # pyright: ignore[reportArgumentType]
    sibling = run_all(engine, [ask("u", prompt(100), Sampling(tokens_max=30))])["u"]
    wanted = chosen_logprobs(new, prompt(100), sibling.tokens)
    torch.testing.assert_close(torch.tensor(sibling.logprobs), wanted, atol=1e-4, rtol=0)


def test_what_waits_for_a_slot_begins_under_the_new_version() -> None:
    old, new = vllm_model("qwen3", 0), vllm_model("qwen3", 1)
    engine = open_vllm(old, slots=1)
    gained = half_way(engine)
    engine.submit(ask("u", prompt(6), Sampling(tokens_max=30)))
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    to_the_end(engine, gained)
    assert gained["u"].spans == [(V2, 30)]
    wanted = chosen_logprobs(new, prompt(6), gained["u"].tokens)
    torch.testing.assert_close(torch.tensor(gained["u"].logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_many_small_chunks_load_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = dict(vllm_model(family, 1).state_dict())
    monkeypatch.setattr(weights.whole_chunks, "__defaults__", (1,))  # a chunk for each tensor
    engine = open_vllm(vllm_model(family, 0))
    engine.update(WeightUpdate(V2, new), "in_flight")
    assert engine.read_back(new, new).differing == ()


CHECKS = 2  # which tensors are tied, and their shapes and values


class Failing(Mapping[str, torch.Tensor]):
    """Tensors of which one is cut off once it was checked (`CHECKS` reads of it)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], bad: str) -> None:
        self.tensors, self.bad, self.reads = tensors, bad, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.bad:
            self.reads += 1
            if self.reads > CHECKS:
                return self.tensors[name][:1]
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_update_that_fails_in_its_middle_serves_nothing_until_one_succeeds(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = vllm_model(family, 0), vllm_model(family, 1)
    monkeypatch.setattr(weights.whole_chunks, "__defaults__", (1,))
    engine = open_vllm(old)
    gained = half_way(engine)
    bad = Failing(new.state_dict(), "model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(EngineRefused, match="v00000002"):
        engine.update(WeightUpdate(V2, bad), "in_flight")
    assert (engine.poll(0.1), engine.version) == ([], V1)
    tensors = new.state_dict()
    engine.update(WeightUpdate(V2, tensors, base=V1, patches=()), "in_flight")  # no base any more
    assert engine.read_back(tensors, tensors).differing == ()
    mine = to_the_end(engine, gained)
    greedy, _ = over_old_cache(old, new, prompt(6), mine.tokens, 12)
    assert (mine.tokens, mine.spans) == (greedy, [(V1, 12), (V2, 28)])


def test_two_hundred_updates_under_load_lose_and_repeat_nothing() -> None:
    check_two_hundred_updates(open_vllm(vllm_model("qwen3"), emit_every=16), 0.0)
