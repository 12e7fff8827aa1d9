"""A bus against a dict, by random operations, with a crash: the process ends, the files stay."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.errors import PositionLost
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Fence, Position
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import Topic, partition_of
from testbed.memory import MemoryBus
from testbed.servers import kafka_broker

PARTITIONS = 2
KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
PARTITION = st.integers(0, PARTITIONS - 1)


class BusAgainstModel(RuleBasedStateMachine):
    """`kept` is the plain topic's content, `newest` the compacted one's newest value per key."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, dict[int, bytes]] = {p: {} for p in range(PARTITIONS)}
        self.ends = dict.fromkeys(range(PARTITIONS), 0)
        self.begins = dict.fromkeys(range(PARTITIONS), 0)
        self.newest: dict[bytes, bytes | None] = {}
        self.compact_end = 0
        self.commits: dict[int, Position] = {}
        self.bus = self.open()
        self.bus.create([Topic("plain", PARTITIONS), Topic("compact", cleanup="compact")])

    def open(self) -> Bus:
        raise NotImplementedError

    @rule(records=st.lists(st.tuples(KEYS, st.binary(max_size=20)), max_size=5))
    def append(self, records: list[tuple[bytes, bytes]]) -> None:
        offsets = self.bus.append("plain", [AppendEntry(key, value) for key, value in records])
        for (key, value), offset in zip(records, offsets, strict=True):
            partition = partition_of(key, PARTITIONS)
            assert offset == self.ends[partition]
            self.kept[partition][offset] = value
            self.ends[partition] += 1

    @rule(key=KEYS, value=st.none() | st.binary(max_size=5))
    def append_compacted(self, key: bytes, value: bytes | None) -> None:
        assert self.bus.append("compact", [AppendEntry(key, value)]) == [self.compact_end]
        self.compact_end += 1
        self.newest[key] = value

    @rule(partition=PARTITION, before=st.integers(0, 30))
    def truncate(self, partition: int, before: int) -> None:
        self.bus.truncate("plain", {partition: before})
        begin = max(self.begins[partition], min(before, self.ends[partition] - 1))
        self.begins[partition] = begin
        self.kept[partition] = {o: v for o, v in self.kept[partition].items() if o >= begin}

    @rule(partition=PARTITION, offset=st.integers(0, 30), term=st.integers(0, 3))
    def commit(self, partition: int, offset: int, term: int) -> None:
        self.commits[partition] = Position(offset, Fence(term, offset))
        self.bus.commit("g", "plain", {partition: self.commits[partition]})

    @rule(partition=PARTITION, data=st.data())
    def read(self, partition: int, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, self.ends[partition]))
        if offset < self.begins[partition]:
            with pytest.raises(PositionLost):
                self.bus.read("plain", {partition: offset})
        else:
            read = self.read_to_end("plain", partition, offset)
            kept = {o: v for o, v in self.kept[partition].items() if o >= offset}
            assert {m.offset: m.value for m in read} == kept

    def read_to_end(self, topic: str, partition: int, offset: int) -> list[Message]:
        """Reads repeatedly: one read promises at least one record, and may end before the rest."""
        found: list[Message] = []
        while offset < self.bus.end(topic)[partition]:
            found += self.bus.read(topic, {partition: offset})
            offset = found[-1].offset + 1
        return found

    @invariant()
    def bounds_and_commits_agree(self) -> None:
        assert self.bus.begin("plain") == self.begins
        assert self.bus.end("plain") == self.ends
        assert self.bus.committed("g", "plain") == self.commits

    @invariant()
    def the_newest_value_per_key_is_kept(self) -> None:
        kept: dict[bytes, bytes | None] = {}
        for message in self.read_to_end("compact", 0, self.bus.begin("compact")[0]):
            kept[message.key] = message.value
        assert kept == self.newest
        assert self.bus.end("compact") == {0: self.compact_end}


class CrashingAgainstModel(BusAgainstModel):
    """The old bus is not closed before the end, as after a kill; its connections hold no locks."""

    crashes_max = 3

    def __init__(self) -> None:
        self.crashed: list[Bus] = []
        super().__init__()

    @precondition(lambda self: len(self.crashed) < self.crashes_max)
    @rule()
    def crash(self) -> None:
        self.crashed.append(self.bus)
        self.bus = self.open()

    def teardown(self) -> None:
        for bus in (*self.crashed, self.bus):
            bus.close()


class SqliteAgainstModel(CrashingAgainstModel):
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        super().__init__()

    def open(self) -> Bus:
        return SqliteBus(self.folder)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


class KafkaAgainstModel(CrashingAgainstModel):
    crashes_max = 2

    def __init__(self) -> None:
        self.url = kafka_broker.new_url()
        super().__init__()

    def open(self) -> Bus:
        return open_bus(self.url)


class MemoryAgainstModel(BusAgainstModel):
    def open(self) -> Bus:
        return MemoryBus()


SqliteAgainstModel.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None
)
MemoryAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
KafkaAgainstModel.TestCase.settings = settings(
    max_examples=8, stateful_step_count=20, deadline=None
)
TestKafkaAgainstModel = KafkaAgainstModel.TestCase
TestSqliteAgainstModel = SqliteAgainstModel.TestCase
TestMemoryAgainstModel = MemoryAgainstModel.TestCase
