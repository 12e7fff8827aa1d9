"""The contract of every engine, on vLLM; weaker promises are stated beside the test."""

import numpy as np
import pytest

from rollstream.errors import EngineRefused
from rollstream.streams.values import Sampling
from tests.engines.test_engine_contract import (  # noqa: F401  collected here, with the `kind` below
    TURNS,
    check_a_move,
    crowd,
    test_a_failed_update_serves_nothing_until_one_succeeds,
    test_a_request_that_cannot_be_served_is_refused_and_leaves_no_trace,
    test_a_trajectory_is_taken_once_at_a_time,
    test_a_turn_continued_with_noise_draws_as_a_fresh_request_of_its_tokens,
    test_abort_after_an_update_gives_the_tokens_of_the_old_version_once,
    test_abort_gives_what_was_not_emitted_and_frees_the_slot,
    test_after_the_environments_turn_it_continues_on_any_engine,
    test_an_append_that_fills_the_context_ends_without_another_token,
    test_an_update_ends_a_span_and_begins_the_next,
    test_append_is_refused_where_nothing_is_held,
    test_it_emits_at_least_every_so_many_tokens,
    test_keep_version_needs_an_empty_engine,
    test_the_same_tokens_alone_and_in_any_batch,
    test_what_is_served_is_read_back_bit_for_bit,
)
from tests.support.contract_engines import Kind
from tests.support.engine_samples import (
    Gained,
    ask,
    gather,
    prompt,
    resumed,
    run_all,
    to_first_stop,
)
from tests.vllm.vllm_samples import open_vllm, vllm_model

pytestmark = pytest.mark.slow


@pytest.fixture
def kind() -> Kind:
    return Kind(
        lambda **sizes: open_vllm(vllm_model("qwen3"), **sizes),
        lambda seed: dict(vllm_model("qwen3", seed).state_dict()),
        "model.layers.0.mlp.up_proj.weight",
    )


def test_moved_in_the_middle_greedy_tokens_stay_the_same(kind: Kind) -> None:
    """Invariant 10; samples at T > 0 keep only their distribution."""
    check_a_move(kind, Sampling(temperature=0, tokens_max=70))


def test_a_trajectory_that_waits_for_its_environment_uses_no_slot(kind: Kind) -> None:
    """Its KV cache stays only as a prefix that the next turn may find."""
    engine = kind.open(slots=1)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    to_first_stop(engine, "t")
    engine.submit(ask("u", prompt(3), Sampling(tokens_max=4)))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.parked) == (0, 1, 1)
    assert len(run_all(engine)["u"].tokens) == 4
    assert engine.abort("t") is None
    assert engine.running() == []
    assert engine.stats().kv_used == 0


def test_stats_count_slots_blocks_tokens_and_time_spent(kind: Kind) -> None:
    engine = kind.open(slots=2, context_max=50)
    gained: dict[str, Gained] = {}
    for i in range(3):
        engine.submit(ask(f"t{i}", prompt(6), Sampling(tokens_max=40)))
    gather(gained, engine.poll(0.0))
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    assert (stats.kv_used, stats.kv_capacity) == (2 * 32, 2 * 64)
    gained |= run_all(engine)
    stats = engine.stats()
    assert stats.tokens == sum(len(mine.tokens) for mine in gained.values()) == 120
    assert (stats.slots, stats.steps, stats.kv_used) == (2, 80, 0)
    assert stats.busy_s > 0


def test_the_context_ends_a_trajectory_that_fills_it(kind: Kind) -> None:
    engine = kind.open(context_max=50)
    mine = run_all(engine, [ask("t", prompt(6), Sampling(temperature=0, tokens_max=70))])["t"]
    assert (len(mine.tokens), mine.finish) == (44, "length")
    full = resumed(ask("t", prompt(6), Sampling(tokens_max=70)), mine)
    assert run_all(engine, [full])["t"].finish == "length"


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_does_not_draw_at_is_refused(
    kind: Kind, temperature: float
) -> None:
    engine = kind.open()
    with pytest.raises(EngineRefused, match="temperature"):
        engine.submit(ask("t", prompt(3), Sampling(temperature=temperature)))
    assert engine.running() == []


def test_it_continues_after_others_and_admits_while_they_run(kind: Kind) -> None:
    engine = kind.open(slots=2, emit_every=4)
    gained: dict[str, Gained] = {}
    for each in crowd(2):
        engine.submit(each)
    gather(gained, engine.poll(0.0))
    for name in ("late0", "late1"):
        engine.submit(ask(name, prompt(5), Sampling(tokens_max=9)))
        gather(gained, engine.poll(0.0))
    while engine.running():
        gather(gained, engine.poll(10.0))
    assert [len(gained[name].tokens) for name in ("other0", "other1", "late0", "late1")] == [
        5,
        12,
        9,
        9,
    ]
    assert np.isfinite([lp for mine in gained.values() for lp in mine.logprobs]).all()
