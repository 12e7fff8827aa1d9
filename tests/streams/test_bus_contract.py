"""The conformance suite of `rollstream.streams.bus.Bus`: the same assertions on every back end."""

import threading
import time

import pytest

from rollstream.errors import BusError, PositionLost, RecordTooLarge
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import Envelope
from rollstream.streams.fence import advance_fence
from rollstream.streams.records import Fence, Position
from rollstream.streams.topics import TOMBSTONE_S, Topic, catalogue, partition_of
from testbed.waiting import WAIT_S
from tests.support.hand_clock import HandClock


def entries(*values: str, key: str = "k", partition: int | None = None) -> list[AppendEntry]:
    return [AppendEntry(key.encode(), value.encode(), partition) for value in values]


def values(bus: Bus, topic: str, offset: int = 0, partition: int = 0) -> list[bytes | None]:
    return [message.value for message in bus.read(topic, {partition: offset})]


def test_the_catalogue_is_created_and_created_again(bus: Bus) -> None:
    bus.create(catalogue())
    bus.create(catalogue())
    assert bus.partitions("trajectories") == 4
    assert bus.settings("ledger").writer == "trainer"
    assert bus.begin("partials") == bus.end("partials") == {0: 0, 1: 0, 2: 0, 3: 0}


def test_an_existing_topic_with_other_settings_is_refused_by_name(bus: Bus) -> None:
    bus.create([Topic("t", 2)])
    with pytest.raises(BusError, match="partitions is 2, asked for 3"):
        bus.create([Topic("t", 3)])
    assert bus.partitions("t") == 2


def test_a_topic_that_was_never_created_is_refused(bus: Bus) -> None:
    with pytest.raises(BusError, match="no topic 'absent'"):
        bus.append("absent", entries("a"))


def test_records_come_back_in_order_with_dense_offsets(bus: Bus, clock: HandClock) -> None:
    bus.create([Topic("t")])
    assert bus.append("t", entries("a", "b")) == [0, 1]
    clock.now_s += 1
    assert bus.append("t", entries("c")) == [2]
    messages = bus.read("t", {0: 0})
    assert [(m.offset, m.key, m.value) for m in messages] == [
        (0, b"k", b"a"),
        (1, b"k", b"b"),
        (2, b"k", b"c"),
    ]
    assert messages[2].timestamp_ms - messages[0].timestamp_ms == 1000
    assert bus.end("t") == {0: 3}


def test_a_record_keeps_the_timestamp_that_its_entry_names(bus: Bus, clock: HandClock) -> None:
    """Also within one append, as a copy of a log appends them."""
    bus.create([Topic("t"), Topic("s", cleanup="compact")])
    clock.now_s = 1_700_000_000.0
    given = [1_600_000_000_001, 1_600_000_000_001, None, 1_600_000_000_002]
    for topic in ("t", "s"):
        copied = [AppendEntry(b"%d" % n, b"v", 0, at) for n, at in enumerate(given)]
        assert bus.append(topic, copied) == [0, 1, 2, 3]
        stamps: list[int] = []
        while len(stamps) < len(given):  # brokers end a segment where times jump, and a read there
            part = bus.read(topic, {0: len(stamps)}, wait_s=WAIT_S)
            assert part, f"{topic}: nothing behind record {len(stamps)}"
            stamps += [message.timestamp_ms for message in part]
        assert stamps == [given[0], given[1], 1_700_000_000_000, given[3]]


def test_a_key_keeps_to_its_partition(bus: Bus) -> None:
    bus.create([Topic("t", 4)])
    keys = [f"group-{number}".encode() for number in range(50)]
    bus.append("t", [AppendEntry(key, key) for key in keys])
    read = bus.read("t", dict.fromkeys(range(4), 0))
    assert sorted(m.value or b"" for m in read) == sorted(keys)
    assert all(m.partition == partition_of(m.key, 4) for m in read)
    assert len({m.partition for m in read}) == 4


def test_a_named_partition_wins_over_the_key(bus: Bus) -> None:
    bus.create([Topic("t", 3)])
    assert bus.append("t", [AppendEntry(b"k", b"v", p) for p in (2, 0, 2)]) == [0, 0, 1]
    assert bus.end("t") == {0: 1, 1: 0, 2: 2}
    with pytest.raises(BusError, match="no partition 3"):
        bus.append("t", [AppendEntry(b"k", b"v", 3)])


def test_a_read_is_bounded_by_records_and_bytes_but_gives_one_whatever_its_size(bus: Bus) -> None:
    bus.create([Topic("t", 2)])
    for partition in (0, 1):
        bus.append("t", [AppendEntry(b"k", bytes(1000), partition) for _ in range(5)])
    everything = {0: 0, 1: 0}
    assert len(bus.read("t", everything, records_max=7)) == 7
    assert len(bus.read("t", everything, bytes_max=3100)) == 3
    assert len(bus.read("t", everything, bytes_max=10)) == 1


def test_a_record_above_the_topics_limit_is_refused_whole_batch(bus: Bus) -> None:
    bus.create([Topic("t", record_bytes_max=100)])
    with pytest.raises(RecordTooLarge, match="above the 100"):
        bus.append("t", [AppendEntry(b"k", b"small"), AppendEntry(b"k", bytes(101))])
    assert bus.end("t") == {0: 0}


def test_a_tombstone_is_between_the_records_of_its_append(bus: Bus) -> None:
    bus.create([Topic("t")])
    bus.append(
        "t",
        [
            AppendEntry(b"a", b"1"),
            AppendEntry(b"", None),
            AppendEntry(b"", b""),
            AppendEntry(b"b", b"2"),
        ],
    )
    read = [(m.offset, m.key, m.value) for m in bus.read("t", {0: 0})]
    assert read == [(0, b"a", b"1"), (1, b"", None), (2, b"", b""), (3, b"b", b"2")]


def test_a_waiting_reader_gets_what_another_thread_appends(bus: Bus) -> None:
    bus.create([Topic("t")])
    writer = threading.Timer(0.05, lambda: bus.append("t", entries("late")))
    writer.start()
    assert [m.value for m in bus.read("t", {0: 0}, wait_s=WAIT_S)] == [b"late"]
    writer.join()


def test_a_reader_that_waits_in_vain_comes_back(bus: Bus) -> None:
    bus.create([Topic("t")])
    started = time.monotonic()
    assert bus.read("t", {0: 0}, wait_s=0.05) == []
    assert time.monotonic() - started >= 0.05


def test_a_follower_that_looks_again_gets_all_in_order_and_once(bus: Bus) -> None:
    bus.create([Topic("t", 2)])
    found: list[bytes | None] = []
    at = {0: 0, 1: 0}
    for wave in range(5):
        names = [f"{wave}.{number}" for number in range(7)]
        bus.append("t", [AppendEntry(b"k", name.encode(), wave % 2) for name in names])
        end = time.monotonic() + WAIT_S
        while len(found) < 7 * (wave + 1) and time.monotonic() < end:
            for message in bus.read("t", at, records_max=3, wait_s=0.01, exact=False):
                at[message.partition] = message.offset + 1
                found.append(message.value)
    assert found == [f"{wave}.{n}".encode() for wave in range(5) for n in range(7)]


def test_a_follower_gets_lost_positions_too(bus: Bus) -> None:
    bus.create([Topic("t")])
    bus.append("t", entries("a", "b", "c"))
    bus.truncate("t", {0: 2})
    with pytest.raises(PositionLost):
        bus.read("t", {0: 0}, wait_s=30, exact=False)


def test_a_read_below_a_truncation_raises_an_error(bus: Bus) -> None:
    bus.create([Topic("t")])
    bus.append("t", entries("a", "b", "c"))
    bus.truncate("t", {0: 2})
    assert bus.begin("t") == {0: 2}
    assert values(bus, "t", 2) == [b"c"]
    with pytest.raises(PositionLost, match="offset 1 was truncated"):
        bus.read("t", {0: 1})


def test_the_last_record_stays_and_the_end_never_moves_back(bus: Bus) -> None:
    bus.create([Topic("t", 2)])
    bus.append("t", entries("a", "b", partition=0))
    bus.truncate("t", {0: 100, 1: 100})
    assert bus.begin("t") == {0: 1, 1: 0}
    assert bus.end("t") == {0: 2, 1: 0}
    bus.truncate("t", {0: 0})
    assert bus.begin("t") == {0: 1, 1: 0}
    assert bus.append("t", entries("c", partition=0)) == [2]


def test_a_position_beyond_the_end_is_refused(bus: Bus) -> None:
    bus.create([Topic("t")])
    bus.append("t", entries("a"))
    assert bus.read("t", {0: 1}) == []
    with pytest.raises(BusError, match="beyond the end 1"):
        bus.read("t", {0: 2})


def test_compaction_keeps_the_newest_record_of_each_key(bus: Bus) -> None:
    bus.create([Topic("t", cleanup="compact")])
    for number in range(200):
        bus.append(
            "t", [AppendEntry(b"a", b"%d" % number), AppendEntry(b"b%d" % (number % 3), b"x")]
        )
    kept = bus.read("t", {0: 0})
    newest = {m.key: m.value for m in kept}
    assert newest == {b"a": b"199", b"b0": b"x", b"b1": b"x", b"b2": b"x"}
    assert bus.end("t") == {0: 400}
    assert [m.offset for m in kept] == sorted(m.offset for m in kept)


def test_a_hole_of_compaction_is_no_lost_position(bus: Bus) -> None:
    bus.create([Topic("t", cleanup="compact")])
    bus.append("t", entries("a", "b", "c"))
    assert values(bus, "t", 1)[-1] == b"c"


def test_a_tombstone_removes_its_key_and_later_itself(embedded_bus: Bus, clock: HandClock) -> None:
    bus = embedded_bus
    bus.create([Topic("t", cleanup="compact")])
    bus.append(
        "t", [AppendEntry(b"gone", b"x"), AppendEntry(b"gone", None), AppendEntry(b"other", b"1")]
    )
    assert {m.key: m.value for m in bus.read("t", {0: 0})} == {b"gone": None, b"other": b"1"}
    clock.now_s += TOMBSTONE_S + 1
    bus.append("t", entries("2", key="other"))
    assert {m.key: m.value for m in bus.read("t", {0: 0})} == {b"other": b"2"}


def test_retention_drops_old_records_but_never_the_last(
    embedded_bus: Bus, clock: HandClock
) -> None:
    bus = embedded_bus
    bus.create([Topic("t", cleanup="time", retention_s=60)])
    bus.append("t", entries("a", "b"))
    clock.now_s += 61
    bus.append("t", entries("c"))
    assert bus.begin("t") == {0: 2}
    with pytest.raises(PositionLost):
        bus.read("t", {0: 0})
    clock.now_s += 61
    bus.append("t", entries("d"))
    assert values(bus, "t", 3) == [b"d"]


def test_commits_carry_fences_and_any_group_may_be_looked_at(bus: Bus) -> None:
    bus.create([Topic("t", 2), Topic("u", 2)])
    bus.commit("dispatch", "t", {0: Position(5, Fence(3, 17))})
    bus.commit("dispatch", "t", {1: Position(9)})
    assert bus.committed("dispatch", "t") == {0: Position(5, Fence(3, 17)), 1: Position(9)}
    assert bus.committed("dispatch", "u") == bus.committed("archive", "t") == {}


def test_a_reader_that_read_no_opening_yet_passes_a_higher_term_after_a_restart(bus: Bus) -> None:
    """`t1 #9` was read first; `Opened 2` lies before the point where the reader began."""
    bus.create([Topic("t")])
    fence, _ = advance_fence(Fence(), Envelope("trainer", 1, 9), opens=False, compacted=False)
    bus.commit("archive", "t", {0: Position(1, fence)})
    stored = bus.committed("archive", "t")[0].fence
    assert stored == fence
    assert advance_fence(stored, Envelope("trainer", 2, 5), opens=False, compacted=False)[1]


def test_one_bus_serves_several_threads(bus: Bus) -> None:
    bus.create([Topic("t", 2)])

    def append(name: str) -> None:
        for number in range(50):
            bus.append("t", [AppendEntry(name.encode(), b"%d" % number)])

    threads = [threading.Thread(target=append, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in (b"w0", b"w1", b"w2", b"w3"):
        partition = partition_of(name, 2)
        mine = [m.value for m in bus.read("t", {partition: 0}) if m.key == name]
        assert mine == [b"%d" % number for number in range(50)]
