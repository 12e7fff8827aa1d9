"""Invariant 4: a trajectory of a version that no rollout holds resumes after an emptied rollout
loaded that version, or restarts on the newest one, whichever is cheaper.
"""

from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.assignments import free_room
from rollstream.consumers.dispatch.layouts import WaveLayouts
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.planner import AssignmentPlanner, Moved, Resumed, Started
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.version_reload import (
    IDLE_WAIT_S,
    IdleRollout,
    Reloaded,
    UnheldTrajectory,
    VersionReload,
    reload_cost,
    trajectories_to_reload,
)
from rollstream.streams.records import Assignment
from rollstream.streams.values import Address, Version
from tests.dispatch.test_recovery import PACE, V3, partial, state_with_group, status

V4, V6 = Version(4, 1), Version(6, 1)
FAST = IdleRollout(slots=8, load_s=1.0, speed=50.0, is_wanted=True, refills=False)

behinds = st.lists(st.tuples(st.integers(1, 500), st.floats(1, 500)), min_size=1, max_size=6).map(
    lambda pairs: [
        UnheldTrajectory(f"0.{i}", gained, left) for i, (gained, left) in enumerate(pairs)
    ]
)
emptied = st.builds(
    IdleRollout,
    st.integers(1, 8),
    st.floats(0, 10),
    st.floats(1, 100),
    st.booleans(),
    st.booleans(),
)


def test_a_long_answer_that_is_nearly_done_is_loaded_for_and_one_that_just_began_is_not():
    done, begun = UnheldTrajectory("0.0", 8000, 500.0), UnheldTrajectory("0.1", 40, 2000.0)
    assert trajectories_to_reload([done, begun], FAST) == ("0.0",)
    assert trajectories_to_reload([begun], FAST) == ()


def test_many_bytes_make_it_dearer():
    behind = [UnheldTrajectory("0.0", 400, 100.0)]
    slow = IdleRollout(slots=8, load_s=60.0, speed=50.0, is_wanted=True, refills=False)
    assert trajectories_to_reload(behind, FAST) == ("0.0",)
    assert trajectories_to_reload(behind, slow) == ()


def test_unwanted_slots_cost_nothing():
    behind = [UnheldTrajectory("0.0", 100, 4000.0)]
    idle = IdleRollout(slots=8, load_s=1.0, speed=50.0, is_wanted=False, refills=False)
    assert trajectories_to_reload(behind, FAST) == ()
    assert trajectories_to_reload(behind, idle) == ("0.0",)


@given(behind=behinds, one=emptied)
def test_never_more_than_there_are_slots_and_never_dearer_than_all_or_nothing(
    behind: list[UnheldTrajectory], one: IdleRollout
):
    chosen = trajectories_to_reload(behind, one)
    assert len(chosen) <= one.slots
    mine = [b for b in behind if b.trajectory in chosen]
    rest = [b for b in behind if b.trajectory not in chosen]
    assert reload_cost(mine, rest, one) <= reload_cost([], behind, one)
    if len(behind) <= one.slots:
        assert reload_cost(mine, rest, one) <= reload_cost(behind, [], one)


@given(behind=behinds, one=emptied)
def test_without_a_limit_of_slots_no_other_choice_is_cheaper(
    behind: list[UnheldTrajectory], one: IdleRollout
):
    if len(behind) > one.slots or one.refills:
        return
    chosen = trajectories_to_reload(behind, one)
    mine = reload_cost([b for b in behind if b.trajectory in chosen],
                [b for b in behind if b.trajectory not in chosen], one)  # fmt: skip
    for count in range(len(behind) + 1):
        for some in combinations(behind, count):
            rest = [b for b in behind if b not in some]
            assert mine <= reload_cost(some, rest, one) + 1e-6


# ---- from the state to assignments
# ----------------------------------------------------------------


def history(size: int | None = 1000, max_lag: int | None = 2) -> VersionReload:
    return VersionReload(lambda version: size, 1e6, max_lag)


def give(state: DispatchState, known: VersionReload, now_s: float = 0.0) -> list[Assignment]:
    """Assigns as the service does."""
    steps = (Moved(), Reloaded(known), Resumed(), Started(WaveLayouts(True, 4)))
    ordering = AssignmentPlanner(PACE, True, 0.25, steps)
    records = [o.record for o in ordering.plan(state, LengthHistory(), (), now_s)]
    for record in records:
        state.apply_assignment(record, Address(0, 1))
    return records


def stranded(*others: tuple[str, Version], gained: int = 50) -> DispatchState:
    """Both trajectories of the group ran under version 3 at "a", which is gone; 4 is announced."""
    state = state_with_group(status("a"))
    give(state, history())
    for trajectory in ("0.0", "0.1"):
        state.apply_partial(partial(trajectory, 1, gained), Address(0, 7))
    del state.rollouts["a"]
    state.version = V4
    for name, version in others:
        state.apply_status(status(name, version=version), 0.0)
    return state


def test_an_empty_rollout_loads_the_version_and_continues():
    state = stranded(("b", V4))
    orders = give(state, history())
    assert {(o.kind, o.rollout, o.version, o.partial, o.from_history) for o in orders} == {
        ("resume", "b", V3, Address(0, 7), True)
    }
    assert [o.attempt for o in orders] == [2, 2]
    assert not any(o.given_up for o in state.assignments.values())


def test_a_rollout_that_loads_a_version_takes_nothing_new_until_it_serves_it():
    state = stranded(("b", V4), ("c", V4))
    give(state, history())
    (loading,) = state.loading()
    assert loading not in free_room(state, 0.25).new
    state.apply_status(status(loading, version=V3, health="generating", quota_left=6), 1.0)
    assert state.loading() == {}
    assert free_room(state, 0.25).new[loading] == 6 - 2


def test_other_trajectories_of_that_version_follow_to_the_rollout_that_loads_it():
    state = stranded(("b", V4), ("c", V4))
    state.apply_status(status("d", version=V3), 0.0)
    first = give(state, history())
    assert {o.rollout for o in first} == {"d"}, "d still holds it"
    del state.rollouts["d"]
    state.assignments.pop("0.1")
    (held,) = [o for o in give(state, history()) if o.trajectory == "0.0"]
    (later,) = [o for o in state.assignments.items() if o[0] == "0.1"]
    assert later[1].rollout == held.rollout


@pytest.mark.parametrize(
    ("size", "version", "why"),
    [(None, V4, "versions_max took it"), (1000, V6, "its tokens are too old to be trained")],
)
def test_what_cannot_or_need_not_be_loaded_starts_again(
    size: int | None, version: Version, why: str
):
    state = stranded(("b", version))
    state.version = version
    orders = give(state, history(size))
    assert {(o.kind, o.partial, o.from_history) for o in orders} == {("start", None, False)}, why


def test_an_empty_rollout_is_awaited_for_a_while_and_then_all_restart():
    state, known = stranded(), history()
    state.apply_status(status("b", version=V4, running=3), 0.0)
    assert give(state, known, 1.0) == []
    state.apply_status(status("c", version=V4, running=1), 0.0)
    assert give(state, known, 1.0 + IDLE_WAIT_S / 2) == []
    assert {o.kind for o in give(state, known, 1.0 + IDLE_WAIT_S)} == {"start"}


def test_a_trajectory_released_by_the_rollout_that_loads_its_version_restarts():
    """Whatever kept it from loading: no attempt is repeated without end (invariant 8)."""
    state = stranded(("b", V4))
    give(state, history())
    for trajectory in ("0.0", "0.1"):
        state.apply_partial(partial(trajectory, 2, 0, last=True), Address(0, 9))
    assert {(o.kind, o.attempt) for o in give(state, history())} == {("start", 3)}


# ---- adapters: a rollout loads a stored version beside those that it holds
# ----------------------------------------------------------------


def give_adapters(state: DispatchState, stored: set[Version]) -> list[Assignment]:
    """Assigns as the service does in a run that trains an adapter."""
    steps = (Moved(), Resumed(), Started(WaveLayouts(False, 4)))
    ordering = AssignmentPlanner(
        PACE, True, 0.25, steps, is_loadable=lambda state, version: version in stored
    )
    records = [o.record for o in ordering.plan(state, LengthHistory(), (), 0.0)]
    for record in records:
        state.apply_assignment(record, Address(0, 2))
    return records


def test_a_rollout_that_holds_another_adapter_resumes_under_a_stored_one():
    state = stranded(("b", V4))
    records = give_adapters(state, {V3, V4})
    assert {(r.trajectory, r.kind, r.rollout, r.version) for r in records} == {
        ("0.0", "resume", "b", V3), ("0.1", "resume", "b", V3),
    }  # fmt: skip
    assert all(record.from_history for record in records)


def test_without_the_stored_adapter_trajectories_restart_on_the_newest():
    records = give_adapters(stranded(("b", V4)), {V4})
    assert {(r.trajectory, r.kind) for r in records} == {("0.0", "start"), ("0.1", "start")}


def test_an_adapter_is_loaded_from_history_once_in_a_row_for_a_trajectory():
    """The rollout that loaded it dies too: another load could fail in the same way, so the
    trajectory restarts.
    """
    state = stranded(("b", V4))
    give_adapters(state, {V3, V4})
    del state.rollouts["b"]
    state.apply_status(status("c", version=V4), 0.0)
    assert {record.kind for record in give_adapters(state, {V3, V4})} == {"start"}
