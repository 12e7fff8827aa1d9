"""Consumer groups by leases, on the embedded back ends: they spread partitions and lose nothing.
Kafka's own groups: `test_kafka_groups.py`.
"""

import pytest

from rollstream.errors import PositionLost
from rollstream.streams.bus import LEASE_S, AppendEntry, Bus
from rollstream.streams.records import Position
from rollstream.streams.sqlite.groups import PartitionLease, claim_partitions
from rollstream.streams.topics import Topic
from tests.support.hand_clock import HandClock

EVERYTHING = [(partition, number) for partition in (0, 1) for number in range(3)]


@pytest.fixture
def filled(embedded_bus: Bus) -> Bus:
    bus = embedded_bus
    bus.create([Topic("t", 2)])
    bus.append("t", [AppendEntry(b"k", b"%d" % number, p) for p, number in EVERYTHING])
    return bus


def test_two_members_share_the_partitions(filled: Bus) -> None:
    one, two = filled.join("g", "t", "one"), filled.join("g", "t", "two")
    read = [*one.poll(0), *two.poll(0)]
    assert sorted((m.partition, m.offset) for m in read) == EVERYTHING
    assert {m.partition for m in one.poll(0)} <= {0}


def test_a_committed_record_is_not_delivered_again(filled: Bus) -> None:
    first = filled.join("g", "t", "one")
    assert len(first.poll(0, records_max=4)) == 4
    first.commit()
    first.close()
    rest = filled.join("g", "t", "two").poll(0)
    assert sorted((m.partition, m.offset) for m in rest) == [(1, 1), (1, 2)]


def test_a_commit_may_stay_below_an_offset(filled: Bus) -> None:
    first = filled.join("g", "t", "one")
    assert len(first.poll(0)) == 6
    first.commit({0: 1, 1: 9})
    first.close()
    rest = filled.join("g", "t", "two").poll(0)
    assert sorted((m.partition, m.offset) for m in rest) == [(0, 1), (0, 2)]


def test_uncommitted_records_go_to_the_next_owner_once_the_lease_ran_out(
    filled: Bus, clock: HandClock
) -> None:
    dead = filled.join("g", "t", "dead")
    assert len(dead.poll(0)) == 6
    heir = filled.join("g", "t", "heir")
    assert heir.poll(0) == []
    clock.now_s += LEASE_S + 1
    assert len(heir.poll(0)) == 6


def test_a_member_that_lost_its_lease_commits_nothing(filled: Bus, clock: HandClock) -> None:
    slow = filled.join("g", "t", "slow")
    slow.poll(0)
    clock.now_s += LEASE_S + 1
    heir = filled.join("g", "t", "heir")
    heir.poll(0, records_max=1)
    heir.commit()
    committed = filled.committed("g", "t")
    slow.commit()
    assert filled.committed("g", "t") == committed


def test_a_member_that_stood_still_and_was_not_replaced_commits(
    filled: Bus, clock: HandClock
) -> None:
    slow = filled.join("g", "t", "slow")
    slow.poll(0)
    clock.now_s += LEASE_S + 1
    slow.commit()
    assert filled.committed("g", "t") == {0: Position(3), 1: Position(3)}


def test_polling_renews_the_lease(filled: Bus, clock: HandClock) -> None:
    alive, other = filled.join("g", "t", "alive"), filled.join("g", "t", "other")
    for _ in range(5):
        clock.now_s += LEASE_S * 0.6
        alive.poll(0)
        other.poll(0)
    alive.commit()
    other.commit()
    assert filled.committed("g", "t") == {0: Position(3), 1: Position(3)}


def test_a_member_at_work_stays_one_without_reading(filled: Bus, clock: HandClock) -> None:
    busy = filled.join("g", "t", "busy")
    assert len(busy.poll(0)) == 6
    for _ in range(5):
        clock.now_s += LEASE_S * 0.6
        assert busy.poll(0, records_max=0) == []
    busy.commit()
    assert filled.committed("g", "t") == {0: Position(3), 1: Position(3)}


def test_a_group_behind_a_truncation_gets_an_error(filled: Bus) -> None:
    filled.commit("g", "t", {0: Position(0), 1: Position(0)})
    filled.truncate("t", {0: 2})
    with pytest.raises(PositionLost):
        filled.join("g", "t", "one").poll(0)


def test_a_member_passes_what_was_truncated_over_and_commits_that(filled: Bus) -> None:
    filled.commit("g", "t", {0: Position(0), 1: Position(0)})
    filled.truncate("t", {0: 2})
    one = filled.join("g", "t", "one")
    with pytest.raises(PositionLost):
        one.poll(0)
    assert one.pass_lost() == {0: 2}
    one.commit()
    assert filled.committed("g", "t") == {0: Position(2), 1: Position(0)}
    assert len(one.poll(0)) == 4


def test_groups_do_not_see_each_other(filled: Bus) -> None:
    assert len(filled.join("g", "t", "one").poll(0)) == 6
    assert len(filled.join("h", "t", "one").poll(0)) == 6


def test_a_claim_takes_its_share_and_only_what_is_free() -> None:
    leases = {
        0: PartitionLease("a", 10),
        1: PartitionLease("a", 10),
        2: PartitionLease("gone", 4),
        3: PartitionLease("b", 10),
    }
    claimed, _ = claim_partitions("b", {"a": 10, "b": 10, "gone": 4}, leases, 4, now_s=5)
    assert claimed == {3}
    assert claim_partitions("a", {"a": 10, "b": 10}, leases, 4, now_s=5) == ({0, 2}, {1})
