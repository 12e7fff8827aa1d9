"""Drafts, shared prompts, adapters, environments and host links, where their effect can be computed
by hand: a decode step lasts 10 ms.
"""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rollstream.producers.drafts.planner import StepCost, best_draft_speed
from rollstream.producers.engines.paced.lengths import LogNormal
from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.cache import KvCache
from rollstream.simulator.cluster import cluster_of, constant_values
from rollstream.simulator.constants import MODELS
from rollstream.simulator.drafting import DraftModel, drafted_roofline
from rollstream.simulator.policies import policy_of
from rollstream.simulator.replica import Replica
from rollstream.simulator.workload import EnvironmentWaits, SimulatedTrajectory, Turns
from rollstream.simulator.world import World
from tests.simulator.small import JOB, SMALL, STEADY, TAILED, run, workload

ALWAYS = DraftModel(found=1.0, rate=0.5)


def answer(name: str, length: int = 100, group: int = 0, turns: Turns = ()) -> SimulatedTrajectory:
    return SimulatedTrajectory(name, group, 0, 10, length, turns=turns, is_known=True)


def ends(replica: Replica, *answers: SimulatedTrajectory) -> dict[str, float]:
    """Submits the answers at once; returns the time at which each one ends."""
    for trajectory in answers:
        replica.submit(trajectory, 0.0)
    found: dict[str, float] = {}
    while replica.due_s is not None:
        now_s = replica.due_s
        found |= {trajectory.name: now_s for trajectory in replica.finish_jump(now_s)}
        replica.start_jump(now_s)
    return found


def replica(**changed: object) -> Replica:
    values = {"roofline": STEADY, "slots": 4, "capacity": 1_000, "reserve": 0, **changed}
    return Replica("r", **values)  # pyright: ignore[reportArgumentType]


def test_a_draft_that_costs_nothing_doubles_the_tokens_of_a_pass():
    """Each drafted token is accepted with probability 1/2 if all before it are: one more."""
    assert ends(replica(), answer("a"))["a"] == pytest.approx(1.0)
    assert ends(replica(drafts=ALWAYS), answer("a"))["a"] == pytest.approx(0.5)


def test_without_earlier_answers_nothing_is_drafted():
    unknown = answer("a")
    unknown.is_known = False
    assert ends(replica(drafts=ALWAYS), unknown)["a"] == pytest.approx(1.0)


@given(
    rows=st.integers(1, 512),
    found=st.floats(0.05, 1.0),
    rate=st.floats(0.05, 0.99),
    token_s=st.floats(1e-6, 1e-2),
)
def test_draft_lengths_are_those_of_the_services_planner(
    rows: int, found: float, rate: float, token_s: float
):
    machine = Roofline(weights_s=0.01, kv_token_s=0.0, row_s=token_s, overlapping=False)
    model = DraftModel(found, rate)
    best = best_draft_speed(rows, model.longest, found, rate, StepCost(0.01, token_s))
    plain = rows / machine.step_s(rows, 0)
    drafted = rows / drafted_roofline(machine, rows, 0, 1.0, model).step_s(rows, 0)
    assert drafted == pytest.approx(max(best, plain), rel=1e-9)


def test_look_ups_can_cost_more_than_drafts_gain():
    slow = replace(ALWAYS, lookup_s=0.02)
    assert drafted_roofline(STEADY, 1, 0, 1.0, slow) == STEADY


def test_the_prompt_of_a_group_is_prefilled_and_cached_once():
    shared, each = replica(cache=KvCache(True)), replica()
    for one in (shared, each):
        for name in "abc":
            one.submit(answer(name), 0.0)
        one.submit(answer("other", group=1), 0.0)
        one.finish_jump(0.0)
        one.start_jump(0.0)
    assert (shared.kv, each.kv) == (2 * 10, 4 * 10)
    assert shared.usage.prefilled_tokens == 2 * 10
    shared.remove("a")
    assert shared.kv == 2 * 10
    shared.remove("b")
    shared.remove("c")
    assert shared.kv == 10


def test_a_prompt_of_another_version_is_prefilled_again():
    shared = replica(cache=KvCache(True))
    shared.submit(answer("a"), 0.0)
    shared.finish_jump(0.0)
    shared.start_jump(0.0)
    shared.update(1, 0.0, 0.0, recompute=False)
    shared.submit(answer("b"), 0.0)
    shared.start_jump(0.0)
    assert shared.usage.prefilled_tokens == 2 * 10


@pytest.mark.parametrize("holds", [True, False])
def test_an_answer_waits_for_its_environment_and_does_not_decode(holds: bool):
    """50 tokens, two seconds, 50 more; what left the cache is prefilled again."""
    one = replica(roofline=replace(STEADY, prefill_token_s=0.001), holds_kv=holds)
    found = ends(one, answer("a", turns=((50, 2.0),)), answer("b"))
    again = 0.0 if holds else (10 + 50) * 0.001
    assert found["b"] == pytest.approx(0.02 + 1.0)
    assert found["a"] == pytest.approx(0.02 + 0.5 + 2.0 + again + 0.5)
    assert one.usage.tokens == 200


def test_a_waiting_answer_keeps_its_cache_until_another_needs_the_room():
    one = replica(capacity=130)
    found = ends(one, answer("a", turns=((50, 2.0),)), answer("b"))
    assert set(found) == {"a", "b"}
    assert one.usage.prefilled_tokens > 2 * 10, "it was prefilled again"


def test_a_moved_answer_waits_on_at_its_target():
    first, second = replica(), replica()
    waiting = answer("a", turns=((50, 2.0),))
    first.submit(waiting, 0.0)
    first.finish_jump(0.0)
    first.start_jump(0.0)
    assert first.due_s == pytest.approx(0.5)
    first.finish_jump(0.5)
    second.submit(first.remove("a"), 1.0)
    assert first.kv == 0
    assert ends(second)["a"] == pytest.approx(0.5 + 2.0 + 0.5)


def test_adapters_are_taken_without_a_drain_and_keep_one_version_per_answer():
    """Steps follow each other as fast as answers: nothing stands still for weights."""
    result = run("ours_adapters", TAILED, update_s=0.0)
    drained = run(replace(policy_of("ours_adapters"), adapters=False), TAILED, update_s=0.0)
    assert result.tokens_per_s > drained.tokens_per_s
    world = World(SMALL, JOB, policy_of("ours_adapters"), workload(TAILED))
    assert not world.policy.drains


def test_an_adapter_is_a_hundredth_of_the_weights():
    constants = constant_values()
    whole, small = (
        cluster_of(MODELS["qwen2.5-7b"], 64, 0.5, policy_of(name), constants)
        for name in ("ours", "ours_adapters")
    )
    assert small.update_s == pytest.approx(whole.update_s * constants["adapter_share"])
    assert small.host_pull_s == pytest.approx(whole.host_pull_s * constants["adapter_share"])


def test_pulls_of_one_host_queue_for_its_link():
    two = replace(SMALL, rollouts_per_host=2, host_pull_s=0.2)
    world = World(two, JOB, policy_of("ours"), workload())
    first, second = world.rollouts.values()
    assert world.pull_s(first) == pytest.approx(0.25)
    assert world.pull_s(second) == pytest.approx(0.4)
    apart = World(replace(two, rollouts_per_host=1), JOB, policy_of("ours"), workload())
    assert [apart.pull_s(one) for one in apart.rollouts.values()] == [0.25, 0.25]


def test_the_last_relay_has_a_version_one_chunk_per_hop_later():
    constants = constant_values()
    model, policy = MODELS["qwen2.5-72b"], policy_of("laminar")
    near, far = (cluster_of(model, gpus, 0.5, policy, constants).arrive_s for gpus in (16, 1024))
    hops = (512 - 8) // 8
    assert far - near == pytest.approx(
        hops * constants["relay_chunk_bytes"] / constants["relay_chain_bandwidth"]
    )


def test_turns_are_those_of_the_seed_and_end_within_the_answer():
    waits = EnvironmentWaits(4.0, LogNormal(1.0, 10.0))
    one, other = (workload(TAILED, environment=waits) for _ in range(2))
    found = [turns for number in range(20) for turns in one.turns(number, one.group(number))]
    assert found == [t for number in range(20) for t in other.turns(number, other.group(number))]
    assert 2 <= sum(map(len, found)) / len(found) <= 4
    lengths = [length for number in range(20) for length in one.group(number)]
    for length, turns in zip(lengths, found, strict=True):
        ends_ = [at for at, _ in turns]
        assert ends_ == sorted(set(ends_))
        assert all(0 < at < length for at in ends_)
