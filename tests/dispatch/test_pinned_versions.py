"""Invariant 11: a version is not deleted while a living rollout holds it, an open partial names it,
or a partial that dispatch has not persisted yet may name it.
"""

import pytest

from rollstream.consumers.dispatch.persistence import StateFile, state_to_persist
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.trainer.retention import LIVE_S, OVERLAP_S, HeldVersions, PinnedVersions
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.pointer import Pointer
from rollstream.storage.weights.retention import StoredVersion, plan_retention
from rollstream.streams.bus import Bus
from rollstream.streams.records import Position, RolloutStatus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import order_all, partial, state_with_group, status
from tests.support.hand_clock import HandClock

V3, V4, V5 = (Version(number, 1) for number in (3, 4, 5))
LATER = OVERLAP_S + 1


@pytest.fixture
def bus() -> Bus:
    made = MemoryBus()
    made.create(catalogue(1))
    return made


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore()


def send_status(bus: Bus, one: RolloutStatus) -> None:
    publish(bus, "status", f"{one.rollout}/{one.term}", one)


def keep(store: ObjectStore, state: DispatchState, bus: Bus | None = None) -> None:
    """With `bus` dispatch has read all partials there."""
    ends = {} if bus is None else bus.end("partials")
    partials = {partition: Position(end) for partition, end in ends.items()}
    keeper = StateFile(store, 1)
    keeper.take_over()
    keeper.keep(state_to_persist(state, 1, {"partials": partials}))


def state_after(bus: Bus, *statuses: RolloutStatus) -> DispatchState:
    """Dispatch's state after these statuses; version 3 generates 0.0 at "a"."""
    state = state_with_group(*statuses)
    order_all(state, "a", keep_version=True)
    for one in statuses:
        send_status(bus, one)
    return state


def test_what_a_rollout_of_the_last_minute_holds_stays_until_it_leaves(bus: Bus):
    clock = HandClock()
    held = HeldVersions(bus, clock)
    send_status(bus, status("a", version=V3))
    assert held() == {V3}
    clock.now_s += LIVE_S - 1
    send_status(bus, status("b", version=V4))
    assert held() == {V3, V4}
    clock.now_s += 2
    send_status(bus, status("b", version=V5))
    assert held() == {V5}
    send_status(bus, status("b", version=V5, health="leaving"))
    assert held() == set()


def test_a_clock_that_runs_ahead_unpins_nothing(bus: Bus, store: ObjectStore):
    """No decision compares the clocks of two machines (invariant 11)."""
    send_status(bus, status("a", version=V3, time_s=100.0))
    send_status(bus, status("b", version=V4, time_s=100.0))
    send_status(bus, status("ahead", version=V5, time_s=100.0 + 3600))
    assert HeldVersions(bus, HandClock())() == {V3, V4, V5}
    keep(store, state_with_group(status("ahead", version=V5, time_s=100.0 + 3600)))
    assert PinnedVersions(bus, store, HandClock())() == {V3, V4, V5}


def test_a_version_that_an_open_partial_names_stays_however_long_its_holder_is_dead(
    bus: Bus, store: ObjectStore
):
    clock = HandClock()
    pinned = PinnedVersions(bus, store, clock)
    state = state_after(bus, status("a", version=V3), status("b", version=V5))
    state.apply_partial(partial("0.0", 1), Address(0, 7))
    keep(store, state)
    assert pinned() == {V3, V5}
    for _ in range(2):
        clock.now_s += 10 * LIVE_S
        send_status(bus, status("b", version=V5))
        assert pinned() == {V3, V5}
    state.apply_completion(0, "0.0")
    keep(store, state)
    assert pinned() == {V5}


def test_what_was_held_since_dispatch_kept_its_state_stays_while_dispatch_is_away(
    bus: Bus, store: ObjectStore
):
    """A partial of it may be in the log that dispatch has not folded yet."""
    clock = HandClock()
    pinned = PinnedVersions(bus, store, clock)
    state = state_after(bus, status("a", version=V3))
    keep(store, state, bus)
    assert pinned() == {V3}
    send_status(bus, status("a", version=V4))
    publish(bus, "partials", "0.0", partial("0.0", 1))
    assert pinned() == {V3, V4}
    send_status(bus, status("a", version=V5))
    for _ in range(3):
        clock.now_s += LATER
        assert pinned() == {V3, V4, V5}
    keep(store, state, bus)
    assert pinned() == {V5}, "dispatch has seen that no partial names the others"


def test_a_partial_that_lands_after_the_status_of_the_next_version_is_waited_for(
    bus: Bus, store: ObjectStore
):
    clock = HandClock()
    pinned = PinnedVersions(bus, store, clock)
    state = state_after(bus, status("a", version=V3))
    assert pinned() == {V3}
    send_status(bus, status("a", version=V4))
    keep(store, state, bus)
    assert pinned() == {V3, V4}
    publish(bus, "partials", "0.0", partial("0.0", 1))  # of V3: its sender was slow
    clock.now_s += LATER
    assert pinned() == {V3, V4}, "dispatch has kept nothing since"


def test_where_the_bound_must_win_the_oldest_named_version_goes_first():
    """Then its trajectories restart: `test_history.py`."""
    versions = [StoredVersion(Version(number, 1)) for number in range(8)]
    pointer = Pointer("run", 1, Version(7, 1), "", "", None)
    plan = plan_retention(versions, pointer, {Version(1, 1), V3}, 0, 3)
    assert plan.unpinned == (Version(1, 1),)
    assert [v.number for v in plan.delete] == [0, 1, 2, 4, 5]
