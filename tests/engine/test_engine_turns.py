"""Groups, turns, aborts: what is prefilled when, and what is emitted."""

import numpy as np
import pytest
import torch
from engine_samples import (
    Gained,
    ask,
    chosen_logprobs,
    gather,
    open_torch,
    prompt,
    run_all,
    tiny_model,
)

from producers.engines.base import Update
from producers.engines.torch_engine import TorchEngine
from streams.errors import EngineRefused
from streams.records import Sampling

TURNS = Sampling(tokens_max=60, stop=(3, 5, 11))


def to_first_stop(engine: TorchEngine, name: str) -> Gained:
    gained: dict[str, Gained] = {}
    while name not in gained or gained[name].finish is None:
        gather(gained, engine.poll(10.0))
    assert gained[name].finish == "stop"
    return gained[name]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_siblings_share_a_prefill_and_differ_in_nothing_else(family: str) -> None:
    """In one poll or in a later one, a copied prompt gives what a prefill of its own gives."""
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
        said = prompt(4 + turn, 50 + turn)
        tokens += mine.tokens + said.tolist()
        engine.append("t", said)
    assert "t" in engine.running()


def test_a_held_trajectory_is_recomputed_with_the_rest() -> None:
    old, new = tiny_model("qwen3", 0), tiny_model("qwen3", 1)
    engine = open_torch(old)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    first = to_first_stop(engine, "t")
    engine.update(Update(engine.version, new.state_dict()), "in_flight_recompute")
    engine.append("t", prompt(4, 9))
    second = run_all(engine)["t"]
    start = np.array([*prompt(6), *first.tokens, *prompt(4, 9)], np.uint32)
    wanted = chosen_logprobs(new, start, second.tokens)
    torch.testing.assert_close(torch.tensor(second.logprobs), wanted, atol=1e-4, rtol=0)


def test_a_held_trajectory_keeps_its_slot_and_its_cache_until_it_is_aborted() -> None:
    engine = open_torch(tiny_model("llama"), slots=1)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    mine = to_first_stop(engine, "t")
    engine.submit(ask("u", prompt(3), Sampling(tokens_max=4)))
    assert engine.poll(0.1) == []
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert stats.kv_used == 6 + len(mine.tokens) - 1
    assert engine.abort("t") is None
    assert len(run_all(engine)["u"].tokens) == 4
    assert engine.stats().kv_used == 0


def test_an_append_that_fills_the_context_ends_without_another_token() -> None:
    engine = open_torch(tiny_model("llama"), context_max=70)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    to_first_stop(engine, "t")
    engine.append("t", prompt(80))
    (last,) = engine.poll(1.0)
    assert (len(last.tokens), last.finish) == (0, "length")
    assert engine.running() == []


def test_append_is_refused_where_nothing_is_held() -> None:
    engine = open_torch(tiny_model("llama"))
    engine.submit(ask("t", prompt(6), Sampling(tokens_max=30)))
    with pytest.raises(EngineRefused, match="not held"):
        engine.append("t", prompt(2))


def test_abort_gives_what_was_not_emitted_and_frees_the_slot() -> None:
    engine = open_torch(tiny_model("qwen3"), slots=1)
    for name in ("t", "u"):
        engine.submit(ask(name, prompt(6), Sampling(tokens_max=30)))
    while engine.stats().tokens < 9:
        assert engine.poll(0.0) == []
    rest = engine.abort("t")
    assert rest is not None
    assert (len(rest.tokens), rest.finish) == (9, None)
    assert engine.abort("t") is None
    assert engine.running() == ["u"]
    assert len(run_all(engine)["u"].tokens) == 30


def test_abort_after_an_update_gives_the_tokens_of_the_old_version_once() -> None:
    """Invariant 3."""
    model = tiny_model("llama")
    engine = open_torch(model)
    engine.submit(ask("t", prompt(6), Sampling(tokens_max=30)))
    while engine.stats().tokens < 9:
        engine.poll(0.0)
    old = engine.version
    engine.update(Update(type(old)(9, 1), model.state_dict()), "in_flight")
    rest = engine.abort("t")
    assert rest is not None
    assert (len(rest.tokens), rest.version) == (9, old)
    assert engine.poll(0.1) == []


def test_it_emits_at_least_every_so_many_tokens() -> None:
    engine = open_torch(tiny_model("llama"), emit_every=8)
    engine.submit(ask("t", prompt(6), Sampling(tokens_max=30)))
    sizes: list[int] = []
    while emissions := engine.poll(10.0):
        sizes += [len(emission.tokens) for emission in emissions]
    assert (sum(sizes), max(sizes)) == (30, 8)


def test_stats_count_slots_tokens_and_processor_time() -> None:
    engine = open_torch(tiny_model("llama"), slots=2, context_max=50)
    gained = run_all(engine, [ask(f"t{i}", prompt(6), Sampling(tokens_max=9)) for i in range(3)])
    stats = engine.stats()
    assert stats.tokens == sum(len(mine.tokens) for mine in gained.values()) == 27
    assert (stats.slots, stats.kv_capacity, stats.steps) == (2, 100, 18)
    assert stats.busy_s > 0
