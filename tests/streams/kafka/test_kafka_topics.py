"""Topics on a real broker: their settings, limits, compaction and names."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource

from rollstream.errors import BusError, PositionLost, RecordTooLarge
from rollstream.storage.claim_check import open_log
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.connect import open_bus
from rollstream.streams.kafka.topic_settings import BrokerTopic, unreplicated_topics
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic, catalogue, partition_of
from testbed.servers.kafka_broker import new_url, server
from testbed.waiting import let_pass, wait_for

EAGER = {  # compaction within a second
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "200",
    "delete.retention.ms": "100",
}


@pytest.fixture
def url() -> str:
    return new_url()


@pytest.fixture
def bus(url: str) -> Iterator[Bus]:
    opened = open_bus(url)
    yield opened
    opened.close()


def change(url: str, topic: str, **configs: str) -> None:
    """Changes a topic's settings as an administrator would; returns once the broker applies them,
    which is after its controller has confirmed them.
    """
    name = f"{url.rpartition('/')[2]}.{topic}"
    wanted = {key.replace("_", "."): value for key, value in configs.items()}
    with KafkaAdminClient(bootstrap_servers=server()) as admin:
        admin.alter_configs([ConfigResource("topic", name, wanted)])
    wait_for(lambda: wanted.items() <= configs_of(url, [Topic(topic)])[name].items())


def grow(url: str, **partitions: int) -> None:
    """Adds partitions as an administrator would; returns once the broker applies them."""
    prefix = url.rpartition("/")[2]
    wanted = {f"{prefix}.{name}": count for name, count in partitions.items()}
    with KafkaAdminClient(bootstrap_servers=server()) as admin:
        admin.create_partitions(wanted)
        wait_for(
            lambda: (
                wanted
                == {t["name"]: len(t["partitions"]) for t in admin.describe_topics([*wanted])}
            )
        )


def configs_of(url: str, topics: Iterable[Topic]) -> dict[str, dict[str, str]]:
    """The settings as the broker has them."""
    prefix = url.rpartition("/")[2]
    wanted = [ConfigResource("topic", f"{prefix}.{topic.name}") for topic in topics]
    with KafkaAdminClient(bootstrap_servers=server()) as admin:
        found = admin.describe_configs(wanted, config_filter="all")["topic"]
    return {name: {key: one["value"] for key, one in of.items()} for name, of in found.items()}


def all_of(bus: Bus) -> list[Message]:
    """Reads topic `t` to its end; one read may stop earlier."""
    found: list[Message] = []
    at, end = bus.begin("t"), bus.end("t")
    while at[0] < end[0]:
        found += bus.read("t", at)
        at = {0: found[-1].offset + 1}
    return found


def test_another_process_finds_the_settings_on_the_broker(bus: Bus, url: str) -> None:
    bus.create(catalogue())
    other = open_bus(url)
    assert [other.settings(topic.name) for topic in catalogue()] == list(catalogue())
    other.create(catalogue())
    other.close()


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ({"cleanup_policy": "compact"}, "cleanup is 'compact', asked for 'safe'"),
        ({"retention_ms": "60000"}, r"retention_s is 60\.0, asked for None"),
        ({"max_message_bytes": "2000000"}, "record_bytes_max is 1016960, asked for 16777216"),
        ({"retention_bytes": "1000000"}, "retention.bytes is '1000000', '-1' is required"),
        ({"message_timestamp_type": "LogAppendTime"}, "'CreateTime' is required"),
    ],
)
def test_a_topic_that_was_changed_is_refused(
    bus: Bus, url: str, configs: dict[str, str], says: str
) -> None:
    bus.create([Topic("t")])
    change(url, "t", **configs)
    other = open_bus(url)
    with pytest.raises(BusError, match=says):
        other.create([Topic("t")])
    other.close()


def test_a_run_asks_the_broker_for_2_mib_and_takes_records_of_16(url: str, tmp_path: Path) -> None:
    log = open_log(url, f"file:{tmp_path}/store")
    log.create(catalogue())
    limits = {int(of["max.message.bytes"]) for of in configs_of(url, catalogue()).values()}
    assert max(limits) == 2 << 20
    for value in (bytes(1 << 20), bytes((16 << 20) - 1)):
        log.append("trajectories", [AppendEntry(b"k", value)])
        log.append("dead", [AppendEntry(b"k", value)])
    with pytest.raises(RecordTooLarge, match="above the 16777216"):
        log.append("trajectories", [AppendEntry(b"k", bytes(16 << 20))])
    partition = partition_of(b"k", log.partitions("trajectories"))
    at = log.read("trajectories", {partition: 1}, records_max=1)
    assert [len(message.value or b"") for message in at] == [(16 << 20) - 1]
    log.close()


def test_topics_that_take_larger_records_are_those_of_an_earlier_run(bus: Bus, url: str) -> None:
    bus.create([Topic("ledger"), Topic("small", record_bytes_max=1000)])
    other = open_bus(url)
    other.create([Topic("ledger", record_bytes_max=1 << 20), Topic("small", record_bytes_max=1000)])
    with pytest.raises(BusError, match="record_bytes_max is 1000, asked for 1001"):
        other.create([Topic("small", record_bytes_max=1001)])
    other.close()


def test_partitions_that_an_administrator_adds_stay_empty(
    bus: Bus, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [b"group-%d" % number for number in range(40)]
    bus.create(catalogue())
    bus.append("trajectories", [AppendEntry(key, b"before") for key in keys])
    grow(url, trajectories=9, ledger=2)
    later = open_bus(url)
    later.create(catalogue())
    assert [r.message for r in caplog.records if "added ones stay empty" in r.message] == [
        f"{url}: topics have more partitions than at the run's start; a key must keep its "
        "partition, so the added ones stay empty: trajectories (4 of 9), ledger (1 of 2)"
    ]
    later.append("trajectories", [AppendEntry(key, b"after") for key in keys])
    looking = open_bus(url)  # as a read-only command does
    for each in (bus, later, looking):
        assert each.partitions("trajectories") == len(each.end("trajectories")) == 4
        assert sum(each.end("trajectories").values()) == 2 * len(keys)
        assert each.end("ledger") == {0: 0}
    member = later.join("scorers", "trajectories", "one")
    found: list[Message] = []
    while len(found) < 2 * len(keys):
        found += member.poll(1.0)
        member.commit()
    assert {(m.key, m.partition) for m in found} == {(key, partition_of(key, 4)) for key in keys}
    assert sum(at.offset for at in later.committed("scorers", "trajectories").values()) == 80
    for each in (member, later, looking):
        each.close()


def test_fewer_partitions_are_refused(bus: Bus, url: str) -> None:
    bus.create([Topic("t", 2)])
    with pytest.raises(BusError, match="partitions is 2, asked for 3"):
        bus.create([Topic("t", 3)])


@pytest.mark.parametrize(
    ("copies", "min_isr", "brokers", "says"),
    [
        (1, 1, 1, ""),
        (3, 2, 3, ""),
        (3, 1, 3, "min.insync.replicas is 1 for 1 of 1 topics (ledger, …), on 3 brokers"),
        (
            1,
            1,
            2,
            "replication factor is 1 for 1 of 1 topics (ledger, …); min.insync.replicas is 1",
        ),
    ],
)
def test_one_copy_on_several_brokers_is_a_warning(
    copies: int, min_isr: int, brokers: int, says: str
) -> None:
    warned = unreplicated_topics({"ledger": BrokerTopic(Topic("ledger"), copies, min_isr)}, brokers)
    assert warned.startswith(says)
    assert bool(warned) == bool(says)


def test_a_record_at_the_limit_is_kept_and_one_over_it_refused(bus: Bus) -> None:
    bus.create([Topic("small", record_bytes_max=1000), Topic("large")])
    for topic, limit in (("small", 1000), ("large", 16 << 20)):
        assert bus.append(topic, [AppendEntry(b"k", bytes(limit - 1))]) == [0]
        with pytest.raises(RecordTooLarge, match=f"above the {limit}"):
            bus.append(topic, [AppendEntry(b"k", bytes(limit))])
        assert [len(m.value or b"") for m in bus.read(topic, {0: 0})] == [limit - 1]
        assert bus.end(topic) == {0: 1}


def test_many_small_records_fit_a_topic_of_small_records(bus: Bus) -> None:
    bus.create([Topic("small", record_bytes_max=1000)])
    count = 3000
    offsets = bus.append("small", [AppendEntry(b"k", bytes(900)) for _ in range(count)])
    assert offsets == list(range(count))


def test_runs_of_other_prefixes_do_not_meet(bus: Bus) -> None:
    other = open_bus(new_url())
    for each in (bus, other):
        each.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"mine")])
    bus.commit("g", "t", {0: Position(1)})
    assert other.end("t") == {0: 0}
    assert other.committed("g", "t") == {}
    other.close()


def test_compacted_topics_are_read_to_their_end_across_the_holes(bus: Bus, url: str) -> None:
    bus.create([Topic("t", cleanup="compact")])
    change(url, "t", **{key.replace(".", "_"): value for key, value in EAGER.items()})
    bus.append("t", [AppendEntry(b"gone", b"x"), AppendEntry(b"gone", None)])
    for number in range(30):
        bus.append("t", [AppendEntry(b"a", b"%d" % number)])
        let_pass(0.02)

    def compacted() -> list[Message] | None:
        bus.append("t", [AppendEntry(b"last", b"y")])  # rolls the segment that was written to
        messages = all_of(bus)
        is_small = len(messages) < 15 and all(m.key != b"gone" for m in messages)
        return messages if is_small else None

    kept = wait_for(compacted)
    assert {m.key: m.value for m in kept} == {b"a": b"29", b"last": b"y"}
    assert kept[-1].offset == bus.end("t")[0] - 1
    assert bus.read("t", {0: 1})[0].offset >= kept[0].offset


def test_a_compacted_topic_is_not_truncated(bus: Bus) -> None:
    bus.create([Topic("t", cleanup="compact")])
    with pytest.raises(BusError, match="is compacted"):
        bus.truncate("t", {0: 1})


def test_what_another_process_truncated_is_a_lost_position(bus: Bus, url: str) -> None:
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"%d" % n) for n in range(10)])
    other = open_bus(url)
    other.truncate("t", {0: 5})
    with pytest.raises(PositionLost, match="offset 3 was truncated, kept are 5 to 10"):
        bus.read("t", {0: 3})
    assert [m.value for m in bus.read("t", {0: 8})] == [b"8", b"9"]
    other.close()


def test_consecutive_reads_of_two_readers_keep_their_own_place(bus: Bus) -> None:
    bus.create([Topic("t")])
    bus.append("t", [AppendEntry(b"k", b"%d" % n) for n in range(100)])
    read: dict[int, list[int]] = {0: [], 50: []}
    for _ in range(10):
        for start, offsets in read.items():
            at = offsets[-1] + 1 if offsets else start
            offsets += [m.offset for m in bus.read("t", {0: at}, records_max=5)]
    assert read == {0: list(range(50)), 50: list(range(50, 100))}


def test_a_partition_that_does_not_exist_is_refused(bus: Bus) -> None:
    bus.create([Topic("t")])
    with pytest.raises(BusError, match="no partition 7"):
        bus.read("t", {7: 0})


def test_a_refusal_of_the_broker_is_reported_at_once(bus: Bus) -> None:
    with pytest.raises(BusError, match="the broker refuses it"):
        bus.create([Topic("not a name")])
    thrice = open_bus(f"{new_url()}?replication=3")
    with pytest.raises(BusError, match=r"the broker refuses it.*[Rr]eplication"):
        thrice.create([Topic("t")])
    thrice.close()
