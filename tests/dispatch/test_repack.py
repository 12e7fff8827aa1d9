"""Repack keeps its promises under all loads: no destination above KV or B_max, versions apart, each
rollout in one part, nothing lost, and no move without gain (invariants 4, 9).
"""

from collections import Counter
from dataclasses import replace
from itertools import combinations

from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.repack import RepackMove, RolloutLoad, is_candidate, plan_repack
from rollstream.streams.values import Version

loads = st.lists(
    st.builds(
        RolloutLoad,
        rollout=st.just(""),
        version=st.integers(0, 2).map(lambda number: Version(number, 1)),
        running=st.integers(0, 12),
        waiting=st.sampled_from([0, 0, 0, 1]),
        kv_used=st.integers(0, 100),
        kv_previous=st.integers(0, 120),
        kv_capacity=st.sampled_from([60, 100]),
        batch_max=st.sampled_from([8, 12]),
        ready=st.sampled_from([True, True, True, False]),
        gains=st.sampled_from([True, True, False]),
    ),
    max_size=24,
).map(lambda many: [replace(load, rollout=f"r{i:02d}") for i, load in enumerate(many)])


def after(many: list[RolloutLoad], plan: tuple[RepackMove, ...]) -> dict[str, tuple[int, int]]:
    """Requests and KV of each rollout after all moves."""
    held = {load.rollout: (load.running, load.kv_used) for load in many}
    for move in plan:
        requests, kv = held[move.source]
        held[move.source] = (0, 0)
        there = held[move.destination]
        held[move.destination] = (there[0] + requests, there[1] + kv)
    return held


@given(many=loads)
def test_no_destination_is_filled_above_its_kv_or_its_batch(many: list[RolloutLoad]):
    plan = plan_repack(many)
    taking = {move.destination for move in plan}
    held, by_name = after(many, plan), {load.rollout: load for load in many}
    assert all(held[n][0] <= by_name[n].batch_max for n in taking)
    assert all(held[n][1] <= by_name[n].kv_capacity for n in taking)


@given(many=loads)
def test_versions_never_mix(many: list[RolloutLoad]):
    """Invariant 4."""
    version = {load.rollout: load.version for load in many}
    assert all(version[m.source] == version[m.destination] for m in plan_repack(many))


def test_policies_that_change_versions_in_between_may_mix_them():
    pair = [load("a", 40), load("b", 50, version=Version(4, 1))]
    assert plan_repack(pair) == ()
    assert plan_repack(pair, keep_version=False) == (RepackMove("a", "b", 2, 40),)


@given(many=loads)
def test_every_request_moves_at_most_once_and_none_is_lost(many: list[RolloutLoad]):
    plan = plan_repack(many)
    sources = Counter(move.source for move in plan)
    assert max(sources.values(), default=1) == 1
    assert not {move.destination for move in plan} & set(sources)
    before = {load.rollout: (load.running, load.kv_used) for load in many}
    assert sum(n for n, _ in before.values()) == sum(n for n, _ in after(many, plan).values())
    assert sum(kv for _, kv in before.values()) == sum(kv for _, kv in after(many, plan).values())


@given(many=loads)
def test_a_rollout_that_pulls_is_unverified_or_has_waiting_requests_takes_no_part(
    many: list[RolloutLoad],
):
    by_name = {load.rollout: load for load in many}
    for move in plan_repack(many):
        assert is_candidate(by_name[move.source])
        assert is_candidate(by_name[move.destination])
        assert by_name[move.source].gains


@given(many=loads)
def test_the_order_of_rollouts_does_not_matter(many: list[RolloutLoad]):
    assert set(plan_repack(many)) == set(plan_repack(list(reversed(many))))


@given(many=loads)
def test_no_two_that_stay_would_have_fitted_into_one(many: list[RolloutLoad]):
    """Of two destinations the one found later did not fit into the room that the other left."""
    plan = plan_repack(many)
    held, gone = after(many, plan), {move.source for move in plan}
    stay = [one for one in many if is_candidate(one) and one.gains and one.rollout not in gone]

    def fits(one: RolloutLoad, other: RolloutLoad) -> bool:
        requests, kv = held[other.rollout]
        return requests + one.running <= other.batch_max and kv + one.kv_used <= other.kv_capacity

    for one, other in combinations(stay, 2):
        assert one.version != other.version or not (fits(one, other) and fits(other, one))


def load(name: str, kv: int, running: int = 2, **changed: object) -> RolloutLoad:
    values: dict[str, object] = {
        "version": Version(3, 1), "waiting": 0, "kv_previous": kv + 1, "kv_capacity": 100,
        "batch_max": 16,
    }  # fmt: skip
    return RolloutLoad(name, kv_used=kv, running=running, **(values | changed))  # type: ignore[arg-type]


def test_two_half_full_rollouts_become_one():
    assert plan_repack([load("a", 40), load("b", 50)]) == (RepackMove("a", "b", 2, 40),)


def test_no_trajectory_fits_so_none_moves():
    assert plan_repack([load("a", 60), load("b", 50)]) == ()


def test_one_candidate_has_nowhere_to_go():
    assert plan_repack([load("a", 40), load("b", 50, kv_previous=50)]) == ()


def test_the_batch_binds_where_kv_is_loose():
    assert plan_repack([load("a", 1, running=9), load("b", 1, running=8)]) == ()
    assert plan_repack([load("a", 1, running=8), load("b", 1, running=8)]) != ()


def test_ties_go_by_name():
    assert plan_repack([load("c", 50), load("a", 50), load("b", 50)]) == (
        RepackMove("b", "a", 2, 50),
    )


def test_the_fullest_that_takes_it_is_chosen():
    plan = plan_repack([load("a", 70), load("b", 60), load("c", 25)])
    assert plan == (RepackMove("c", "a", 2, 25),)


def test_nothing_is_planned_where_no_rollout_would_gain():
    assert plan_repack([load("a", 40, gains=False), load("b", 50, gains=False)]) == ()


def test_a_rollout_that_gains_nothing_takes_the_others():
    plan = plan_repack([load("a", 90), load("b", 5, gains=False)])
    assert plan == (RepackMove("a", "b", 2, 90),)
