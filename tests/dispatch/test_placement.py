"""Placement never exceeds a rollout's room, keeps groups together where they fit, and equal inputs
give equal plans.
"""

from collections import Counter

from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.placement import PlacementWork, RolloutRoom, place_samples

groups = st.lists(st.integers(1, 12), max_size=12).map(
    lambda sizes: [
        PlacementWork(tuple(f"{g}.{i}" for i in range(size))) for g, size in enumerate(sizes)
    ]
)
rooms = st.lists(st.integers(-2, 40), min_size=1, max_size=5).map(
    lambda free: [RolloutRoom(f"r{i}", room) for i, room in enumerate(free)]
)


@given(groups=groups, rooms=rooms)
def test_no_rollout_gets_more_than_its_room(groups: list[PlacementWork], rooms: list[RolloutRoom]):
    plan = place_samples(groups, rooms)
    given_to = Counter(plan.values())
    assert all(given_to[room.rollout] <= max(0, room.free) for room in rooms)


@given(groups=groups, rooms=rooms)
def test_everything_that_fits_is_placed_once_in_order(
    groups: list[PlacementWork], rooms: list[RolloutRoom]
):
    plan = place_samples(groups, rooms)
    wanted = [t for work in groups for t in work.trajectories]
    free = sum(max(0, room.free) for room in rooms)
    assert list(plan) == wanted[: min(free, len(wanted))]


@given(groups=groups, rooms=rooms)
def test_the_order_of_rooms_does_not_matter(groups: list[PlacementWork], rooms: list[RolloutRoom]):
    assert place_samples(groups, rooms) == place_samples(groups, list(reversed(rooms)))


def test_a_group_that_fits_stays_together_on_the_freest_rollout():
    plan = place_samples(
        [PlacementWork(("0.0", "0.1", "0.2"))], [RolloutRoom("a", 3), RolloutRoom("b", 5)]
    )
    assert set(plan.values()) == {"b"}


def test_a_group_is_split_only_when_no_rollout_holds_it():
    plan = place_samples(
        [PlacementWork(("0.0", "0.1", "0.2", "0.3"))], [RolloutRoom("a", 3), RolloutRoom("b", 2)]
    )
    assert Counter(plan.values()) == {"a": 3, "b": 1}
