"""The paced engine on a manual clock: time follows the roofline, and the KV capacity binds."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.paced.engine import CATCH_UP_S_MAX
from rollstream.streams.values import Sampling
from tests.support.engine_samples import V1, V2, Gained, ask, gather, prompt, resumed
from tests.support.paced_samples import ROOFLINE, VOCABULARY, WEIGHTS, HandPace, open_paced, run_all

ENDLESS = Sampling(tokens_max=60)
DRAWN = Sampling(tokens_max=80, stop=(2, 3))


def test_each_step_lasts_as_the_roofline_of_its_rows_and_its_cache() -> None:
    pace = HandPace()
    engine = open_paced(slots=3, pace=pace)
    for n, length in enumerate((5, 9, 30)):
        engine.submit(ask(f"t{n}", prompt(length, n), ENDLESS))
    cached, at_s = 4 + 8 + 29, pace.now() + ROOFLINE.prefill_s(4 + 8 + 29)
    for _ in range(20):
        engine.poll(0.0)
        at_s += ROOFLINE.step_s(3, cached)
        cached += 3
        assert pace.now() == pytest.approx(at_s)
        assert engine.stats().kv_used == cached
    assert engine.stats().busy_s == pytest.approx(at_s - 100)


def test_a_long_poll_takes_the_same_time_as_many_short_ones() -> None:
    ends: list[float] = []
    for deadline_s in (0.0, 0.03, 1000.0):
        pace = HandPace()
        engine, gained = open_paced(slots=2, pace=pace, emit_every=7), dict[str, Gained]()
        for n in range(5):
            engine.submit(ask(f"t{n}", prompt(4, n), DRAWN))
        while engine.running():
            gather(gained, engine.poll(deadline_s))
        ends.append(pace.now())
    assert ends == pytest.approx([ends[0]] * 3)


def test_it_returns_when_the_deadline_is_over_and_no_later_than_a_step_after() -> None:
    pace = HandPace(scale=10.0)
    engine = open_paced(pace=pace)
    engine.submit(ask("t", prompt(4), Sampling(tokens_max=80)))
    began = pace.now()
    assert engine.poll(0.02) == []  # 0.2 s of the accelerator
    assert 0.2 - ROOFLINE.step_s(1, 90) <= pace.now() - began <= 0.2 + 1e-9


def test_steps_continue_while_the_caller_is_busy_but_not_while_it_stood_still() -> None:
    pace = HandPace()
    engine = open_paced(pace=pace, context_max=4000)
    engine.submit(ask("t", prompt(4), Sampling(tokens_max=3000)))
    engine.poll(0.0)
    pace.at_s += 0.5
    before = engine.stats().tokens
    engine.poll(0.0)
    assert engine.stats().tokens - before >= int(0.5 / ROOFLINE.step_s(1, 200))
    pace.at_s += 3600
    before = engine.stats().tokens
    engine.poll(0.0)
    assert engine.stats().tokens - before <= CATCH_UP_S_MAX / ROOFLINE.step_s(1, 0) + 64


def test_a_recomputed_cache_takes_a_prefill_of_all_of_it() -> None:
    ends = dict[str, float]()
    for mode in ("in_flight", "in_flight_recompute"):
        pace = HandPace()
        engine = open_paced(pace=pace)
        engine.submit(ask("t", prompt(50), Sampling(tokens_max=30)))
        for _ in range(5):
            engine.poll(0.0)
        engine.update(WeightUpdate(V2, WEIGHTS), mode)
        run_all(engine)
        ends[mode] = pace.now()
    assert ends["in_flight_recompute"] - ends["in_flight"] == pytest.approx(
        ROOFLINE.prefill_s(49 + 5)
    )


def test_the_capacity_makes_others_wait_though_slots_are_free() -> None:
    engine = open_paced(slots=8, kv_capacity=100)
    for n in range(4):
        engine.submit(ask(f"t{n}", prompt(40, n), Sampling(tokens_max=5)))
    engine.poll(0.0)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 2)
    assert stats.kv_used <= stats.kv_capacity == 100


def test_the_last_to_enter_is_preempted_and_loses_only_time() -> None:
    requests = [ask(f"t{n}", prompt(10, n), ENDLESS) for n in range(3)]
    alone = {r.trajectory: run_all(open_paced(), [r])[r.trajectory].tokens for r in requests}
    engine = open_paced(slots=3, kv_capacity=100)
    together = run_all(engine, requests)
    assert engine.preempted > 0
    assert {name: mine.tokens for name, mine in together.items()} == alone
    assert next(iter(together)) == "t0"  # the oldest is never preempted
    assert engine.stats().kv_used == 0


def test_abort_of_a_preempted_trajectory_gives_what_it_had() -> None:
    engine, gained = open_paced(slots=3, kv_capacity=100), dict[str, Gained]()
    for n in range(3):
        engine.submit(ask(f"t{n}", prompt(10, n), ENDLESS))
    while not engine.preempted:
        gather(gained, engine.poll(0.0))
    rest = engine.abort("t2")
    assert rest is not None
    assert len(rest.tokens) > 10
    other = run_all(open_paced(), [ask("t2", prompt(10, 2), ENDLESS)])["t2"]
    assert rest.tokens.tolist() == other.tokens[: len(rest.tokens)]


def test_a_capacity_below_one_sequence_is_refused() -> None:
    with pytest.raises(EngineRefused, match=r"KV capacity of 90.*paced\.kv_tokens"):
        open_paced(context_max=96, kv_capacity=90)


def test_answers_are_as_long_as_drawn_and_end_in_a_stop_token() -> None:
    request = ask("t", prompt(6), Sampling(tokens_max=10_000, stop=(2, 3)))
    engine = open_paced(context_max=20_000)
    mine = run_all(engine, [request])["t"]
    assert len(mine.tokens) == engine._lengths.draw(request.seed, prompt(6), "t", 6)
    assert mine.finish == "stop"
    assert mine.tokens[-1] in (2, 3)
    assert not {2, 3} & set(mine.tokens[:-1])
    assert max(mine.tokens) < VOCABULARY


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "poll", "poll", "move", "update", "recompute"]),
            st.integers(0, 9),
        ),
        min_size=5,
        max_size=60,
    ),
    st.integers(96, 300),
)
def test_any_schedule_gives_every_trajectory_its_own_tokens(
    actions: list[tuple[str, int]], capacity: int
) -> None:
    """Invariants 3 and 10 under submits, moves, preemption and updates in any order; the capacity
    holds at every moment.
    """
    engine = open_paced(slots=5, kv_capacity=capacity, emit_every=7)
    requests, gained = {}, dict[str, Gained]()
    versions = (type(V1)(n, 1) for n in itertools.count(2))
    for number, (action, pick) in enumerate(actions):
        names = engine.running()
        if action == "submit":
            name = f"t{number}"
            requests[name] = ask(name, prompt(1 + 4 * pick, pick), DRAWN)
            engine.submit(requests[name])
        elif action == "poll":
            for _ in range(1 + 3 * pick):
                gather(gained, engine.poll(0.01 * pick))
        elif action == "move" and names:
            name = names[pick % len(names)]
            rest = engine.abort(name)
            gather(gained, [rest] if rest else [])
            engine.submit(resumed(requests[name], gained.get(name, Gained())))
        elif action in ("update", "recompute"):
            mode = "in_flight" if action == "update" else "in_flight_recompute"
            engine.update(WeightUpdate(next(versions), WEIGHTS), mode)
        stats = engine.stats()
        assert 0 <= stats.kv_used <= capacity
        assert stats.running <= stats.slots
        assert stats.running + stats.waiting == len(engine.running())
    while emissions := engine.poll(1000.0):
        gather(gained, emissions)
    assert not engine.running()
    assert engine.stats().kv_used == 0
    for name, request in requests.items():
        alone = run_all(open_paced(slots=1), [request])[name]
        assert (gained[name].tokens, gained[name].finish) == (alone.tokens, alone.finish)
