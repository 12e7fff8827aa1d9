"""Admission keeps the pace first (invariant 5), and no group that ended untrained stalls it."""

from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.admission import (
    AdmissionPace,
    admissible_groups,
    version_needed,
    wave_of,
)

ETA = AdmissionPace(groups_per_step=4, max_lag=2, ready_groups_max=10, waves_max=100)
FREE = AdmissionPace(groups_per_step=4, max_lag=None, ready_groups_max=10, waves_max=100)

counts = st.integers(0, 500)


def test_a_fresh_run_admits_eta_plus_one_waves():
    assert admissible_groups(ETA, version=0, admitted=0, closed=0, trained=0) == 3 * 4


def test_max_lag_zero_is_synchronous():
    sync = AdmissionPace(4, 0, 10, 100)
    assert admissible_groups(sync, version=0, admitted=4, closed=0, trained=0) == 0
    assert admissible_groups(sync, version=1, admitted=4, closed=0, trained=4) == 4


def test_groups_closed_untrained_make_room_for_refills():
    assert admissible_groups(ETA, version=0, admitted=12, closed=5, trained=0) == 5


def test_the_last_waves_are_not_overshot():
    short = AdmissionPace(4, 2, 10, waves_max=2)
    assert admissible_groups(short, version=1, admitted=6, closed=0, trained=4) == 2


def test_without_a_lag_limit_the_ready_groups_are_bounded():
    assert admissible_groups(FREE, version=0, admitted=0, closed=0, trained=0) == 10
    assert admissible_groups(FREE, version=50, admitted=30, closed=0, trained=22) == 2


@given(version=st.integers(0, 90), admitted=counts, closed=counts, seen=st.integers(1, 5))
def test_a_version_seen_twice_or_late_changes_nothing(
    version: int, admitted: int, closed: int, seen: int
):
    closed = min(closed, admitted)
    once = admissible_groups(ETA, version, admitted, closed, 0)
    assert all(admissible_groups(ETA, version, admitted, closed, 0) == once for _ in range(seen))
    assert admissible_groups(ETA, version + 1, admitted, closed, 0) >= once


@given(version=st.integers(0, 90), closed=st.integers(0, 50))
def test_a_group_admitted_at_the_limit_obeys_max_lag_when_it_is_trained(version: int, closed: int):
    """The last group that may be admitted now belongs to wave version + η: trained from there, at
    lag η.
    """
    admitted = closed
    while admissible_groups(ETA, version, admitted, closed, 0):
        admitted += 1
    assert ETA.max_lag is not None
    last = wave_of(ETA, admitted - 1, closed)
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
            more = admissible_groups(pace, trained // 4, admitted, closed, trained)
            assert more > 0
            admitted += more
        trained, closed = trained + (end == "trained"), closed + (end == "closed")
    assert trained == 24
    assert admitted - closed <= 24
