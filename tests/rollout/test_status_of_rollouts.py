"""The statuses that repack needs: KV now and before, B_max, and whether it is about to pull."""

from pathlib import Path

from hypothesis import given, strategies as st

from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.streams.records import RolloutStatus
from tests.rollout.weights.following import Followed


def newest(following: Followed) -> RolloutStatus:
    return following.records("status", RolloutStatus)[-1]


@given(st.lists(st.tuples(st.floats(0.5, 3.0), st.integers(0, 1000)), min_size=2, max_size=20))
def test_the_previous_kv_is_that_of_the_report_before(reports: list[tuple[float, int]]) -> None:
    pulse, now, before = StatusSchedule(1.0), 50.0, reports[0][1]
    for later_s, kv in reports:
        now += later_s
        assert pulse.previous_kv(kv, now) == before
        before = kv


def test_reports_that_follow_at_once_compare_with_the_heartbeat_before() -> None:
    pulse = StatusSchedule(1.0)
    assert pulse.previous_kv(100, 10.0) == 100
    assert pulse.previous_kv(90, 11.0) == 100
    assert pulse.previous_kv(91, 11.01) == 100  # its health changed
    assert pulse.previous_kv(0, 11.02) == 100
    assert pulse.previous_kv(50, 12.0) == 90


def test_a_status_has_b_max_and_when_it_will_take_other_weights(tmp_path: Path) -> None:
    following = Followed(tmp_path)
    following.publish()
    rollout = following.rollout(following.engine(), "keep_version")
    rollout.send_status("generating")
    assert (newest(following).decode_batch_max, newest(following).pulling) == (4, False)
    rollout.parts.publisher.batch_max = 3
    following.publish()
    following.follower.read()
    rollout.send_status("generating")
    status = newest(following)
    assert (status.decode_batch_max, status.pulling, status.kv_previous) == (3, True, 0)
    following.close()
