"""Groups with more trajectories than they need, and rollouts whose trajectories wait for their
environments: what dispatch counts, releases and assigns.
"""

import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.assignments import free_room, slot_room
from rollstream.consumers.dispatch.persistence import restore_state, state_to_persist
from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState
from rollstream.look.monitor.failure_causes import failure_cause
from rollstream.streams.admissible import is_group_full
from rollstream.streams.records import Admitted
from rollstream.streams.values import Address
from tests.dispatch.test_recovery import V3, order_all, state_with_group, status

NAMES = tuple(f"0.{i}" for i in range(5))


def state_of_five(needed: int = 3) -> DispatchState:
    state = DispatchState()
    state.apply_admitted(Admitted(0, 0, NAMES, 60.0, Address(0, 0), needed))
    for name in NAMES:
        state.assignments[name] = CurrentAssignment(1, "a", 1, 0, V3)
    return state


def end(state: DispatchState, name: str, generated: int | None = 4) -> list[str]:
    """Returns the trajectories that are released by this completion."""
    state.apply_completion(0, name, generated)
    return [one.trajectory for one in state.end_if_full(0)]


def test_the_last_needed_completion_releases_the_others() -> None:
    state = state_of_five()
    assert [end(state, name) for name in ("0.4", "0.1")] == [[], []]
    assert end(state, "0.0") == ["0.2", "0.3"]
    assert (state.released, state.groups, state.assignments) == (2, {}, {})
    assert end(state, "0.2") == []
    assert (state.completed, state.late) == (3, 1)


def test_a_dead_completion_is_none_of_the_needed_ones() -> None:
    state = state_of_five()
    assert [end(state, name, None) for name in ("0.0", "0.1")] == [[], []]
    assert [end(state, name) for name in ("0.2", "0.3")] == [[], []]
    assert end(state, "0.4") == []  # all have ended: nothing is left to release
    assert (state.groups, state.released) == ({}, 0)


def test_a_successor_counts_on_where_its_predecessor_stopped() -> None:
    state = state_of_five()
    end(state, "0.4")
    end(state, "0.1")
    other = restore_state(state_to_persist(state, 1, {}))
    assert end(other, "0.0") == ["0.2", "0.3"]


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 5))
def test_dispatch_and_the_rule_agree_on_every_order(living: list[bool], needed: int) -> None:
    state = state_of_five(needed)
    for number, is_living in enumerate(living, start=1):
        if 0 not in state.groups:
            break
        end(state, NAMES[number - 1], 4 if is_living else None)
        full = is_group_full(5, needed, sum(living[:number]), number)
        assert (0 not in state.groups) == full


def test_a_rollout_takes_one_more_for_each_that_waits_for_its_environment() -> None:
    state = state_with_group(status("a", running=2, parked=6, parked_max=4), status("b"))
    assert (slot_room(8, 0.5, 4), slot_room(8, 0.5, 0)) == (16, 12)
    assert free_room(state, 0.5).new == {"a": 16, "b": 12}
    order_all(state, "a")
    assert free_room(state, 0.5).new == {"a": 14, "b": 12}


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("environment: took longer than 60 s", "environment timeout"),
        ("environment: turns_max of 4 reached", "environment out of turns"),
        ("environment: its process ended (SIGKILL)", "environment crash"),
        ("environment: KeyError at task.py:3: 'x'", "environment error"),
        ("agent: no turn within 30 s", "agent timeout"),
        ("agent: exit code 3", "agent crash"),
        ("reward: the reward is nan", "reward error"),
        ("engine: an empty prompt", "engine error"),
        ("refused (spans): 2 spans under keep_version", "refused"),
        ("poisoned", "other"),
        ("", "other"),
    ],
)
def test_reasons_have_few_causes(reason: str, cause: str) -> None:
    assert failure_cause(reason) == cause
