"""A vLLM server by URL keeps the contract of every engine. It continues by itself between two
polls, so where other engines are stopped at the twelfth token, this one is stopped somewhere later,
and the brake holds it until then.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.local import weights as chunks
from rollstream.streams.values import Sampling
from testbed.update_reference import over_old_cache
from tests.engines.test_engine_contract import (  # noqa: F401  collected here, with the `kind` below
    TURNS,
    crowd,
    test_a_request_that_cannot_be_served_is_refused_and_leaves_no_trace,
    test_a_trajectory_is_taken_once_at_a_time,
    test_after_the_environments_turn_it_continues_on_any_engine,
    test_an_append_that_fills_the_context_ends_without_another_token,
    test_append_is_refused_where_nothing_is_held,
    test_the_same_tokens_alone_and_in_any_batch,
    test_what_is_served_is_read_back_bit_for_bit,
)
from tests.support.contract_engines import Kind
from tests.support.engine_samples import (
    V1,
    V2,
    Gained,
    ask,
    chosen_logprobs,
    gather,
    prompt,
    resumed,
    run_all,
    to_first_stop,
)
from tests.vllm.remote.server import KEY, Server, serve
from tests.vllm.vllm_samples import check_all_whole, take_updates, vllm_model

pytestmark = pytest.mark.slow
LONG = Sampling(temperature=0, tokens_max=400)
LONG_STEP_S, SHORT_STEP_S = 0.1, 0.02  # the 400 tokens of `LONG` take 40 s
ENTRY = {"name": "a", "dtype": "F32", "shape": [6], "begin": 0, "bytes": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = serve(vllm_model("qwen3").config, tmp_path_factory.mktemp("server"))
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def not_braked(server: Server) -> Iterator[None]:
    yield
    server.brake(0)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_SERVER", KEY)


def connect(
    server: Server, slots: int = 4, context_max: int = 96, emit_every: int = 64
) -> VllmEngine:
    model, sizes = vllm_model("qwen3"), (slots, context_max, emit_every)
    settings = VllmSettings(url=server.url, api_key_env="KEY_OF_THE_SERVER")
    return VllmEngine(
        model.config, model.state_dict(), V1, EngineOptions(*sizes), settings=settings
    )


@pytest.fixture
def kind(server: Server) -> Kind:
    server.brake(SHORT_STEP_S)
    return Kind(
        lambda **sizes: connect(server, **sizes),
        lambda seed: dict(vllm_model("qwen3", seed).state_dict()),
        "model.layers.0.mlp.up_proj.weight",
    )


def half_way(server: Server, engine: VllmEngine) -> dict[str, Gained]:
    """One trajectory `t` of 400 tokens, somewhere in its middle; the brake is on."""
    server.brake(LONG_STEP_S)
    engine.submit(ask("t", prompt(6), LONG))
    gained: dict[str, Gained] = {}
    while engine.stats().tokens < 12:
        gather(gained, engine.poll(0.1))
    return gained


def to_the_end(server: Server, engine: VllmEngine, gained: dict[str, Gained]) -> Gained:
    server.brake(0)
    while engine.running():
        gather(gained, engine.poll(1.0))
    return gained["t"]


def test_in_flight_keeps_the_cache_and_stamps_spans(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3; a chunk for each tensor."""
    monkeypatch.setattr(chunks.whole_chunks, "__defaults__", (1,))
    old, new = vllm_model("qwen3", 0), vllm_model("qwen3", 1)
    engine = connect(server, context_max=448, emit_every=5)
    gained = half_way(server, engine)
    engine.update(engine.prepare(WeightUpdate(V2, new.state_dict())), "in_flight")
    mine = to_the_end(server, engine, gained)
    (first, before), (second, after) = mine.spans
    assert (first, second, before + after) == (V1, V2, 400)
    greedy, logprobs = over_old_cache(old, new, prompt(6), mine.tokens, before)
    assert mine.tokens == greedy
    torch.testing.assert_close(torch.tensor(mine.logprobs), logprobs, atol=1e-4, rtol=0)


def test_recomputing_equals_a_full_prefill_and_siblings_never_hit_the_old_cache(
    server: Server,
) -> None:
    new = vllm_model("qwen3", 1)
    engine = connect(server, context_max=512)
    run_all(engine, [ask("first", prompt(100), Sampling(temperature=0, tokens_max=4))])
    gained = half_way(server, engine)
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight_recompute")
    mine = to_the_end(server, engine, gained)
    before = mine.spans[0][1]
    wanted = chosen_logprobs(new, prompt(6), mine.tokens)[before:]
    torch.testing.assert_close(torch.tensor(mine.logprobs[before:]), wanted, atol=1e-4, rtol=0)
    sibling = run_all(engine, [ask("u", prompt(100), Sampling(tokens_max=30))])["u"]
    wanted = chosen_logprobs(new, prompt(100), sibling.tokens)
    torch.testing.assert_close(torch.tensor(sibling.logprobs), wanted, atol=1e-4, rtol=0)


def test_keep_version_needs_an_empty_engine(server: Server) -> None:
    """Invariant 4: the refusal changes nothing, and the trajectory ends under its version."""
    engine, new = connect(server, context_max=448), vllm_model("qwen3", 1).state_dict()
    gained = half_way(server, engine)
    with pytest.raises(EngineRefused, match="keep_version"):
        engine.update(WeightUpdate(V2, new), "keep_version")
    assert to_the_end(server, engine, gained).spans == [(V1, 400)]
    engine.update(WeightUpdate(V2, new), "keep_version")
    after = run_all(engine, [ask("u", prompt(6), Sampling(temperature=0, tokens_max=3))])
    assert after["u"].spans == [(V2, 3)]


def test_moved_in_the_middle_greedy_tokens_stay_the_same(server: Server) -> None:
    """Invariant 10; samples at T > 0 keep only their distribution."""
    request = ask("t", prompt(6), LONG)
    whole = run_all(connect(server, context_max=448), [request])["t"]
    first = connect(server, context_max=448, emit_every=8)
    part = half_way(server, first)
    rest = first.abort("t")
    server.brake(0)
    gather(part, [rest] if rest else [])
    assert first.running() == []
    other = connect(server, context_max=448)
    moved = run_all(other, [*crowd(3), resumed(request, part["t"])])["t"]
    assert 12 <= len(part["t"].tokens) < 400
    assert part["t"].tokens + moved.tokens == whole.tokens


def test_it_emits_tokens_while_it_runs_and_admits_others(server: Server) -> None:
    engine = connect(server, slots=2, emit_every=8)
    requests = [ask(f"t{i}", prompt(6, i), Sampling(tokens_max=30)) for i in range(5)]
    for request in requests:
        engine.submit(request)
    stats = engine.stats()
    assert (stats.slots, stats.running, stats.waiting) == (2, 0, 5)
    sizes: list[int] = []
    gained: dict[str, Gained] = {}
    while emissions := engine.poll(10.0):
        gather(gained, emissions)
        sizes += [len(emission.tokens) for emission in emissions]
        assert engine.stats().running <= 2
    assert [len(mine.tokens) for mine in gained.values()] == [30] * 5
    assert len(sizes) > len(requests)  # a busy machine joins some of them
    assert np.isfinite([p for mine in gained.values() for p in mine.logprobs]).all()
    assert (engine.stats().tokens, engine.stats().kv_used) == (150, 0)


def test_a_trajectory_that_waits_for_its_environment_uses_no_slot(server: Server) -> None:
    engine = connect(server, slots=1)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    to_first_stop(engine, "t")
    engine.submit(ask("u", prompt(3), Sampling(tokens_max=4)))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.parked) == (0, 1, 1)
    assert len(run_all(engine)["u"].tokens) == 4
    assert engine.abort("t") is None
    assert engine.running() == []


def test_what_waits_for_a_slot_begins_under_the_new_version(server: Server) -> None:
    new = vllm_model("qwen3", 1)
    engine = connect(server, slots=1, context_max=448)
    gained = half_way(server, engine)
    engine.submit(ask("u", prompt(6), Sampling(tokens_max=30)))
    engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    to_the_end(server, engine, gained)
    assert gained["u"].spans == [(V2, 30)]
    wanted = chosen_logprobs(new, prompt(6), gained["u"].tokens)
    torch.testing.assert_close(torch.tensor(gained["u"].logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["missing", "shape", "nan"])
def test_a_wrong_version_is_refused_and_serves_nothing_until_one_is_right(
    server: Server, kind: Kind, fault: str
) -> None:
    engine, bad = kind.open(context_max=448), dict(kind.weights(1))
    gained = half_way(server, engine)  # pyright: ignore[reportArgumentType]
    wrong = bad.pop(kind.tensor)
    if fault != "missing":
        bad[kind.tensor] = wrong[:-1] if fault == "shape" else wrong * np.nan
    with pytest.raises(EngineRefused, match=kind.tensor):
        engine.update(WeightUpdate(V2, bad), "in_flight")
    assert (engine.poll(0.1), engine.version) == ([], V1)
    engine.update(WeightUpdate(V2, kind.weights(1)), "in_flight")
    mine = to_the_end(server, engine, gained)  # pyright: ignore[reportArgumentType]
    assert (len(mine.tokens), [version for version, _ in mine.spans]) == (400, [V1, V2])


def test_a_load_that_fails_in_its_middle_serves_nothing_until_one_went_through(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks.whole_chunks, "__defaults__", (1,))
    engine, new = connect(server, context_max=448), dict(vllm_model("qwen3", 1).state_dict())
    gained = half_way(server, engine)
    update = engine.prepare(WeightUpdate(V2, new))
    routes, (name, _) = engine._weights._routes, update.prepared.names[3]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineRefused, match="differs"):  # nothing of it is left then
        routes.call("check_chunk", engine._core.owner, name, [ENTRY], ["0" * 32])  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineRefused, match="v00000002"):
        engine.update(update, "in_flight")
    assert (engine.poll(0.1), engine.version) == ([], V1)
    engine.update(WeightUpdate(V2, new), "in_flight")
    assert engine.read_back(new, new).differing == ()
    assert len(to_the_end(server, engine, gained).tokens) == 400


def test_a_tensor_that_changed_on_its_way_is_never_loaded(server: Server) -> None:
    """Invariant 6."""
    engine = connect(server)
    weights, tensor = engine._weights, torch.arange(6.0)
    name = weights.send_chunk("one/0", [("a", tensor)])  # pyright: ignore[reportAttributeAccessIssue]
    owner, routes = engine._core.owner, weights._routes  # pyright: ignore[reportAttributeAccessIssue]
    routes.call("put_piece", owner, "two/0", 24, 0, "AAAA" * 8)
    with pytest.raises(EngineRefused, match="'a' differs from its hash"):
        routes.call("check_chunk", owner, "two/0", [ENTRY], ["0" * 32])
    for gone in (name, "two/0"):
        with pytest.raises(EngineRefused, match="not here"):
            routes.call("check_chunk", owner, gone, [ENTRY], ["0" * 32])


def test_forty_updates_under_load_lose_and_repeat_nothing(server: Server) -> None:
    engine = connect(server, emit_every=16)
    server.brake(SHORT_STEP_S)
    gained = take_updates(engine, 40, 60, 0.02)
    server.brake(0)
    check_all_whole(engine, gained, 40, 60)
    assert any(len(mine.spans) > 1 for mine in gained.values())


def test_the_former_rollout_of_a_server_is_refused(server: Server) -> None:
    before = connect(server)
    after = connect(server)
    with pytest.raises(EngineRefused, match="one rollout for each server"):
        before.update(WeightUpdate(V2, vllm_model("qwen3", 1).state_dict()), "in_flight")
    assert len(run_all(after, [ask("t", prompt(6), Sampling(tokens_max=9))])["t"].tokens) == 9


def test_a_server_with_less_than_the_settings_is_refused_by_name(server: Server) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-num-seqs.*rollouts.slots is 17"):
        connect(server, slots=17)
    with pytest.raises(ConfigurationError, match=r"--max-model-len.*rollouts.context_max is 513"):
        connect(server, context_max=513)


def test_a_wrong_key_is_refused_and_never_printed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_SERVER", "wrong-one")
    with pytest.raises(ConfigurationError, match="KEY_OF_THE_SERVER") as refused:
        connect(server)
    assert "wrong-one" not in str(refused.value)


def test_a_killed_server_is_an_error_of_the_rollout_and_emitted_tokens_continue_later(
    server: Server,
) -> None:
    """The last test here: a new server resumes the trajectory from the log."""
    request = ask("t", prompt(6), LONG)
    engine = connect(server, context_max=448, emit_every=8)
    part = half_way(server, engine)
    server.kill()
    with pytest.raises(EngineRefused, match=r"127\.0\.0\.1"):
        to_the_end(server, engine, part)
    gained_before = part["t"]
    server.start()
    again = connect(server, context_max=448)  # waits for it
    rest = run_all(again, [resumed(request, gained_before)])["t"]
    model = vllm_model("qwen3")
    greedy, _ = over_old_cache(model, model, prompt(6), gained_before.tokens + rest.tokens, 0)
    assert (gained_before.tokens + rest.tokens, rest.finish) == (greedy, "length")
