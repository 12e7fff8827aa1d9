"""Admission keeps the pace first (invariant 5), and no group that ended untrained stalls it."""

from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.admission import (
    AdmissionPace,
    admissible_groups,
    version_needed,
    wave_of,
)
from rollstream.consumers.dispatch.persistence import restore_state, state_to_persist
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.values import Version

ETA = AdmissionPace(groups_per_step=4, max_lag=2, ready_groups_max=10, waves_max=100)
FREE = AdmissionPace(groups_per_step=4, max_lag=None, ready_groups_max=10, waves_max=100)

counts = st.integers(0, 500)


def allowed(version: int, admitted: int, closed: int) -> int:
    """In a run whose steps all had 4 groups."""
    return admissible_groups(ETA, version, admitted, closed, 0, 4 * version)


def test_a_fresh_run_admits_eta_plus_one_waves():
    assert admissible_groups(ETA, version=0, admitted=0, closed=0, trained=0, settled=0) == 3 * 4


def test_max_lag_zero_is_synchronous():
    sync = AdmissionPace(4, 0, 10, 100)
    assert admissible_groups(sync, version=0, admitted=4, closed=0, trained=0, settled=0) == 0
    assert admissible_groups(sync, version=1, admitted=4, closed=0, trained=4, settled=4) == 4


def test_groups_closed_untrained_make_room_for_refills():
    assert admissible_groups(ETA, version=0, admitted=12, closed=5, trained=0, settled=0) == 5


def test_the_last_waves_are_not_overshot():
    short = AdmissionPace(4, 2, 10, waves_max=2)
    assert admissible_groups(short, version=1, admitted=6, closed=0, trained=4, settled=4) == 2


def test_without_a_lag_limit_the_ready_groups_are_bounded():
    assert admissible_groups(FREE, version=0, admitted=0, closed=0, trained=0, settled=0) == 10
    assert admissible_groups(FREE, version=5, admitted=30, closed=0, trained=22, settled=20) == 2


@given(version=st.integers(0, 90), admitted=counts, closed=counts, seen=st.integers(1, 5))
def test_a_version_seen_twice_or_late_changes_nothing(
    version: int, admitted: int, closed: int, seen: int
):
    closed = min(closed, admitted)
    once = allowed(version, admitted, closed)
    assert all(allowed(version, admitted, closed) == once for _ in range(seen))
    assert allowed(version + 1, admitted, closed) >= once


@given(version=st.integers(0, 90), closed=st.integers(0, 50))
def test_a_group_admitted_at_the_limit_obeys_max_lag_when_it_is_trained(version: int, closed: int):
    """The last group that may be admitted now belongs to wave version + η: trained from there, at
    lag η.
    """
    admitted = closed
    while allowed(version, admitted, closed):
        admitted += 1
    assert ETA.max_lag is not None
    last = wave_of(ETA, version, admitted - 1, closed, 4 * version)
    assert last == version + ETA.max_lag
    assert version_needed(ETA, last) <= version


@given(
    max_lag=st.sampled_from([None, 0, 1, 4]),
    ends=st.lists(st.sampled_from(["trained", "trained", "closed"]), max_size=120),
)
def test_groups_that_end_untrained_never_stall_a_run(max_lag: int | None, ends: list[str]):
    """However many groups are filtered, expired or dead: once none is open more may be admitted,
    and in the end the last step has its groups.
    """
    pace = AdmissionPace(groups_per_step=4, max_lag=max_lag, ready_groups_max=8, waves_max=6)
    admitted = trained = closed = 0
    for end in [*ends, *["trained"] * 24]:
        if trained == 24:
            break
        if admitted == trained + closed:
            more = admissible_groups(
                pace, trained // 4, admitted, closed, trained, trained // 4 * 4
            )
            assert more > 0
            admitted += more
        trained, closed = trained + (end == "trained"), closed + (end == "closed")
    assert trained == 24
    assert admitted - closed <= 24


def test_a_step_of_another_size_counts_what_was_trained_as_it_was():
    """Four steps of 8 groups, then steps of 3: today's size times four is 12 trained groups, and no
    more would be admitted for ever; after steps of 2 a size of 8 would admit 54 groups at once.
    """
    small, large = AdmissionPace(3, 2, 10, 100), AdmissionPace(8, 2, 10, 100)
    assert admissible_groups(small, 4, admitted=32, closed=0, trained=32, settled=32) == 3 * 3
    assert admissible_groups(large, 4, admitted=8, closed=0, trained=8, settled=8) == 3 * 8
    assert wave_of(small, 4, admitted=32, closed=0, settled=32) == 4
    assert wave_of(large, 4, admitted=8, closed=0, settled=8) == 4


@given(
    max_lag=st.sampled_from([None, 0, 1, 4]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_steps_of_any_sizes_get_their_groups_and_no_more(max_lag: int | None, sizes: list[int]):
    """Each step has another size than the one before, as if each were a resume."""
    admitted = trained = 0
    for step, size in enumerate(sizes):
        pace = AdmissionPace(size, max_lag, ready_groups_max=9, waves_max=len(sizes))
        more = admissible_groups(pace, step, admitted, 0, trained, trained)
        assert more <= max(9, ((max_lag or 0) + 1) * size)
        admitted += more
        assert admitted - trained >= size, "no step waits for groups for ever"
        trained += size


def test_groups_of_steps_that_are_not_published_yet_are_not_settled():
    state = DispatchState()
    for group, step in enumerate((1, 1, 2, 2, 3)):
        state.apply_taken(group, step)
    assert (state.trained, state.settled) == (5, 0)
    state.version = Version(2, 1)
    assert state.settled == 4
    state.apply_superseded(1, 3)
    assert (state.trained, state.settled) == (4, 4)
    assert restore_state(state_to_persist(state, 1, {})).taken == state.taken
