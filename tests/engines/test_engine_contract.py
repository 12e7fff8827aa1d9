"""The contract of every engine (`producers/engines/base.py`), on each that needs no accelerator."""

from dataclasses import replace

import numpy as np
import pytest

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import Engine, GenerationRequest, WeightUpdate
from rollstream.streams.records import ENVIRONMENT
from rollstream.streams.values import Sampling
from tests.support.contract_engines import KINDS, Kind
from tests.support.engine_samples import (
    V1,
    V2,
    Gained,
    ask,
    gather,
    half_way,
    prompt,
    resumed,
    run_all,
    to_first_stop,
    to_the_end,
)

TURNS = Sampling(tokens_max=60, stop=(3, 5, 11))


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def crowd(count: int) -> list:
    return [
        ask(f"other{i}", prompt(2 + i % 7, 100 + i), Sampling(tokens_max=5 + 7 * i % 60))
        for i in range(count)
    ]


def test_the_same_tokens_alone_and_in_any_batch(kind: Kind) -> None:
    """Invariant 10."""
    request = ask("mine", prompt(6), Sampling(temperature=0.9, tokens_max=70, stop=(2,)))
    alone = run_all(kind.open(slots=1), [request])["mine"]
    for slots, before, after in [(2, 3, 3), (5, 9, 2), (16, 0, 20)]:
        others = crowd(before + after)
        engine = kind.open(slots=slots, emit_every=11)
        together = run_all(engine, [*others[:before], request, *others[before:]])["mine"]
        assert (together.tokens, together.finish) == (alone.tokens, alone.finish)


def test_moved_in_the_middle_it_continues_with_the_same_tokens(kind: Kind) -> None:
    """Invariant 10: abort on one engine, resume on another, among other neighbours."""
    check_a_move(kind, Sampling(temperature=0.9, tokens_max=70))


def check_a_move(kind: Kind, sampling: Sampling) -> None:
    request = ask("mine", prompt(6), sampling)
    whole = run_all(kind.open(), [request])["mine"]
    first, part = kind.open(slots=3, emit_every=8), {"mine": Gained()}
    for each in [*crowd(2), request]:
        first.submit(each)
    while len(part["mine"].tokens) < 30:
        gather(part, first.poll(0.0))
    rest = first.abort("mine")
    gather(part, [rest] if rest else [])
    other = kind.open(slots=6)
    for each in crowd(5):
        other.submit(each)
    moved = run_all(other, [resumed(request, part["mine"])])["mine"]
    assert part["mine"].tokens + moved.tokens == whole.tokens
    assert moved.finish == "length"


@pytest.mark.parametrize("mode", ["in_flight", "in_flight_recompute"])
def test_an_update_ends_a_span_and_begins_the_next(kind: Kind, mode: str) -> None:
    """Invariant 3."""
    engine = kind.open(emit_every=5)
    gained = half_way(engine)
    engine.update(WeightUpdate(V2, kind.weights(1)), mode)  # pyright: ignore[reportArgumentType]
    assert to_the_end(engine, gained).spans == [(V1, 12), (V2, 28)]


def test_keep_version_needs_an_empty_engine(kind: Kind) -> None:
    """Invariant 4: the refusal changes nothing, and the trajectory ends under its version."""
    engine = kind.open()
    gained = half_way(engine)
    with pytest.raises(EngineRefused, match="keep_version"):
        engine.update(WeightUpdate(V2, kind.weights(1)), "keep_version")
    gather(gained, engine.poll(10.0))
    assert gained["t"].spans == [(V1, 40)]
    engine.update(WeightUpdate(V2, kind.weights(1)), "keep_version")
    after = run_all(engine, [ask("u", prompt(6), Sampling(temperature=0, tokens_max=3))])
    assert after["u"].spans == [(V2, 3)]


@pytest.mark.parametrize("fault", ["missing", "shape", "nan"])
def test_a_failed_update_serves_nothing_until_one_succeeds(kind: Kind, fault: str) -> None:
    engine, bad = kind.open(), dict(kind.weights(1))
    gained = half_way(engine)
    if fault == "missing":
        del bad[kind.tensor]
    else:
        wrong = bad[kind.tensor]
        bad[kind.tensor] = wrong[:-1] if fault == "shape" else wrong * np.nan
    with pytest.raises(EngineRefused, match=kind.tensor):
        engine.update(WeightUpdate(V2, bad), "in_flight")
    assert engine.poll(0.1) == []
    assert engine.version == V1
    engine.update(WeightUpdate(V2, kind.weights(1)), "in_flight")
    assert to_the_end(engine, gained).spans == [(V1, 12), (V2, 28)]


def test_what_is_served_is_read_back_bit_for_bit(kind: Kind) -> None:
    engine, old, new = kind.open(), kind.weights(0), kind.weights(1)
    assert engine.read_back(old, old).differing == ()
    assert kind.tensor in engine.read_back(new, new).differing
    engine.update(WeightUpdate(V2, new), "in_flight")
    assert engine.read_back(new, new).differing == ()


def test_a_trajectory_that_waits_for_its_environment_uses_no_slot(kind: Kind) -> None:
    engine = kind.open(slots=1)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    to_first_stop(engine, "t")
    engine.submit(ask("u", prompt(3), Sampling(tokens_max=4)))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.parked, stats.kv_used) == (0, 1, 1, 0)
    assert len(run_all(engine)["u"].tokens) == 4
    assert engine.running() == ["t"]
    assert engine.abort("t") is None
    assert (engine.stats().parked, engine.running()) == (0, [])


@pytest.mark.parametrize("slots", [2, 6])
def test_episodes_that_share_slots_generate_what_each_generates_alone(
    kind: Kind, slots: int
) -> None:
    """Invariant 10: twelve dialogues of four turns on few slots, whose environments answer in
    another order than they were asked; the KV of some is dropped meanwhile.
    """
    requests = [ask(f"t{i}", prompt(3 + i % 5, i), TURNS, hold=True) for i in range(12)]
    alone = {
        request.trajectory: dialogue(kind.open(slots=1, context_max=120), [request])
        for request in requests
    }
    together = dialogue(kind.open(slots=slots, context_max=120), requests)
    assert together == {name: found[name] for name, found in alone.items()}


def dialogue(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[list[int]]]:
    """Returns the turns of each trajectory. Replies come in reverse order, and only when every
    other trajectory waits too or has ended.
    """
    turns: dict[str, list[list[int]]] = {request.trajectory: [[]] for request in requests}
    stopped: list[str] = []
    for request in requests:
        engine.submit(request)
    while engine.running():
        for emission in engine.poll(1000.0):
            turns[emission.trajectory][-1] += emission.tokens.tolist()
            stopped += [emission.trajectory] if emission.finish == "stop" else []
        if len(stopped) < len(engine.running()):
            continue
        for name in reversed(stopped):
            if len(turns[name]) == 4:
                engine.abort(name)
                continue
            engine.append(name, prompt(4, len(turns[name])))
            turns[name].append([])
        stopped = []
    return turns


def test_after_the_environments_turn_it_continues_on_any_engine(kind: Kind) -> None:
    """Invariant 10: the second turn is the same after a move."""
    engine = kind.open()
    request = ask("t", prompt(6), TURNS, hold=True)
    engine.submit(request)
    first = to_first_stop(engine, "t")
    engine.append("t", prompt(4, 9))
    second = to_first_stop(engine, "t")
    moved = resumed(request, first)
    tokens = np.concatenate((moved.tokens, prompt(4, 9)))
    sources = np.concatenate((moved.sources, np.full(4, 2, np.uint8)))
    again = ask("t", tokens, TURNS, hold=True)
    again = type(again)("t", 0, tokens, sources, TURNS, 7, moved.logprobs, moved.spans, True)
    other = kind.open(slots=2)
    other.submit(again)
    assert to_first_stop(other, "t").tokens == second.tokens


def test_a_turn_continued_with_noise_draws_as_a_fresh_request_of_its_tokens(kind: Kind) -> None:
    """Invariant 10, for the turns of an agent: each draws by the name of its own request, whether
    the engine continues its cache or a fresh request has all tokens before the turn.
    """
    request = ask("t", prompt(6), TURNS, hold=True)
    drawn: list[list[int]] = []
    for noise in ("t/one", "t/two"):
        engine = kind.open()
        engine.submit(request)
        first = to_first_stop(engine, "t")
        engine.append("t", prompt(4, 9), noise)
        drawn.append(to_first_stop(engine, "t").tokens)
        moved = resumed(request, first)
        fresh = replace(
            moved,
            trajectory="t/1",
            tokens=np.concatenate((moved.tokens, prompt(4, 9))),
            sources=np.concatenate((moved.sources, np.full(4, ENVIRONMENT, np.uint8))),
            hold=True,
            noise=noise,
        )
        other = kind.open(slots=2)
        other.submit(fresh)
        assert to_first_stop(other, "t/1").tokens == drawn[-1]
    assert drawn[0] != drawn[1]


def test_an_append_that_fills_the_context_ends_without_another_token(kind: Kind) -> None:
    engine = kind.open(context_max=70)
    engine.submit(ask("t", prompt(6), TURNS, hold=True))
    to_first_stop(engine, "t")
    engine.append("t", prompt(80))
    (last,) = engine.poll(1.0)
    assert (len(last.tokens), last.finish) == (0, "length")
    assert engine.running() == []


def test_a_dialogue_behind_one_without_room_continues_its_own_cache(kind: Kind) -> None:
    """Both are appended to before either has the slot; the first ends without it."""
    alone = kind.open(slots=1, context_max=100)
    full, next_one = (ask(name, prompt(6, n), TURNS, hold=True) for n, name in enumerate("ab"))
    alone.submit(next_one)
    first = to_first_stop(alone, "b").tokens
    alone.append("b", prompt(4, 9))
    second = to_first_stop(alone, "b").tokens

    engine = kind.open(slots=1, context_max=100)
    engine.submit(full)
    to_first_stop(engine, "a")
    engine.submit(next_one)
    assert to_first_stop(engine, "b").tokens == first
    engine.append("a", prompt(100))
    engine.append("b", prompt(4, 9))
    assert to_first_stop(engine, "b").tokens == second
    assert "a" not in engine.running()


def test_append_is_refused_where_nothing_is_held(kind: Kind) -> None:
    engine = kind.open()
    engine.submit(ask("t", prompt(6), Sampling(tokens_max=30)))
    with pytest.raises(EngineRefused, match="not held"):
        engine.append("t", prompt(2))


def test_abort_gives_what_was_not_emitted_and_frees_the_slot(kind: Kind) -> None:
    engine = kind.open(slots=1)
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


def test_abort_after_an_update_gives_the_tokens_of_the_old_version_once(kind: Kind) -> None:
    """Invariant 3."""
    engine = kind.open()
    engine.submit(ask("t", prompt(6), Sampling(tokens_max=30)))
    while engine.stats().tokens < 9:
        engine.poll(0.0)
    engine.update(WeightUpdate(V2, kind.weights(0)), "in_flight")
    rest = engine.abort("t")
    assert rest is not None
    assert (len(rest.tokens), rest.version) == (9, V1)
    assert engine.poll(0.1) == []


def test_it_emits_at_least_every_so_many_tokens(kind: Kind) -> None:
    engine = kind.open(emit_every=8)
    engine.submit(ask("t", prompt(6), Sampling(tokens_max=30)))
    sizes: list[int] = []
    while emissions := engine.poll(10.0):
        sizes += [len(emission.tokens) for emission in emissions]
    assert (sum(sizes), max(sizes)) == (30, 8)


def test_stats_count_slots_tokens_and_time_spent(kind: Kind) -> None:
    engine = kind.open(slots=2, context_max=50)
    gained = run_all(engine, [ask(f"t{i}", prompt(6), Sampling(tokens_max=9)) for i in range(3)])
    stats = engine.stats()
    assert stats.tokens == sum(len(mine.tokens) for mine in gained.values()) == 27
    assert (stats.slots, stats.kv_capacity, stats.steps) == (2, 100, 18)
    assert stats.busy_s > 0


@pytest.mark.parametrize(
    ("tokens", "sampling", "named"),
    [
        (np.zeros(0, np.uint32), Sampling(), "empty prompt"),
        (np.array([3, 99], np.uint32), Sampling(), "token 99"),
        (prompt(96), Sampling(), "context of 96"),
        (prompt(3), Sampling(temperature=-1), "temperature"),
        (prompt(3), Sampling(top_p=0), "top_p"),
        (prompt(3), Sampling(top_k=-2), "top_k"),
        (prompt(3), Sampling(tokens_max=0), "tokens_max"),
        (prompt(3), Sampling(stop=(19,)), "stop"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_leaves_no_trace(
    kind: Kind, tokens: np.ndarray, sampling: Sampling, named: str
) -> None:
    engine = kind.open()
    with pytest.raises(EngineRefused, match=named):
        engine.submit(ask("t", tokens, sampling))
    assert engine.running() == []


def test_a_trajectory_is_taken_once_at_a_time(kind: Kind) -> None:
    engine = kind.open()
    engine.submit(ask("t", prompt(3), Sampling()))
    with pytest.raises(EngineRefused, match="already here"):
        engine.submit(ask("t", prompt(3), Sampling()))
