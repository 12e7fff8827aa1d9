"""Writes a topic that may already hold the first records, left by a writer that was killed.

The caller passes all records again, from the first on. Records that are already in the topic are
compared byte for byte; the others are appended. So no record is written twice, and none is appended
behind records of another origin. A topic with records that no replay began is refused before
anything is written.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from rollstream.streams.bus import Bus, AppendEntry, Message
from rollstream.errors import BusError, ConfigurationError
from rollstream.streams.records import Position

BEGUN_GROUP = "replay"
"""Consumer group whose commit marks a topic as begun by a replay."""
RECORDS_MAX, BYTES_MAX = 512, 4 << 20  # of one append


def refuse_foreign_records(bus: Bus, topics: Sequence[str], where: str) -> None:
    """Raise `ConfigurationError` if one of these topics holds records that no replay wrote."""
    for topic in topics:
        records = sum(bus.end(topic).values())
        if records and not bus.committed(BEGUN_GROUP, topic):
            raise ConfigurationError(
                f"{where} holds {records} records in {topic} already, which no replay wrote; give "
                "a bus where this topic is empty (another folder, another prefix)"
            )


def mark_begun(bus: Bus, topic: str) -> None:
    """Mark a topic as begun by a replay, before its first record."""
    partitions = range(bus.partitions(topic))
    bus.commit(BEGUN_GROUP, topic, dict.fromkeys(partitions, Position()))


class TopicHash:
    """A running hash over the keys and values of a topic, in order within each partition; it does
    not depend on offsets or read batches.
    """

    def __init__(self) -> None:
        self._by: dict[int, xxhash.xxh3_128] = {}
        self.records = 0

    def add(self, partition: int, key: bytes, value: bytes | None) -> None:
        """Add the partition's next record, framed by its lengths (-1 for a tombstone)."""
        size = -1 if value is None else len(value)
        hasher = self._by.setdefault(partition, xxhash.xxh3_128())
        hasher.update(f"{len(key)} {size} ".encode())
        hasher.update(key)
        hasher.update(value or b"")
        self.records += 1

    def digest(self) -> str:
        """xxh3-128 in hex over the numbers and digests of the non-empty partitions, in order."""
        whole = xxhash.xxh3_128()
        for partition, one in sorted(self._by.items()):
            whole.update(f"{partition} ".encode() + one.digest())
        return whole.hexdigest()


@dataclass(slots=True)
class ResumedTopicWriter:
    """The writer of one topic; `already` counts the records that were there. `close` must be called
    last.
    """

    bus: Bus
    topic: str
    where: str
    already: int = 0
    _ends: dict[int, int] = field(default_factory=dict[int, int])
    _at: dict[int, int] = field(default_factory=dict[int, int])
    _there: dict[int, deque[Message]] = field(default_factory=dict[int, deque[Message]])
    _batch: list[AppendEntry] = field(default_factory=list[AppendEntry])
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._ends = self.bus.end(self.topic)
        self._at = dict.fromkeys(self._ends, 0)

    def write(self, entry: AppendEntry) -> None:
        """Write the next record of the partition that `entry` names; `ConfigurationError` if the
        topic holds another record there.
        """
        assert entry.partition is not None
        partition = entry.partition
        if self._at[partition] < self._ends[partition]:
            there = self._next(partition)
            if (there.offset, there.key, there.value) != (
                self._at[partition], entry.key, entry.value,
            ):  # fmt: skip
                raise self._differs(partition)
            self.already += 1
        else:
            self._append(entry)
        self._at[partition] += 1

    def close(self) -> None:
        """Append the rest; `ConfigurationError` if the topic holds further records."""
        self._flush()
        for partition, end in self._ends.items():
            if self._at[partition] < end:
                raise self._differs(partition)

    def _append(self, entry: AppendEntry) -> None:
        size = len(entry.key) + len(entry.value or b"")
        if self._batch and (len(self._batch) >= RECORDS_MAX or self._bytes + size > BYTES_MAX):
            self._flush()
        self._batch.append(entry)
        self._bytes += size

    def _flush(self) -> None:
        if self._batch:
            self.bus.append(self.topic, self._batch)
        self._batch, self._bytes = [], 0

    def _next(self, partition: int) -> Message:
        there = self._there.setdefault(partition, deque())
        if not there:
            there += self.bus.read(
                self.topic, {partition: self._at[partition]}, bytes_max=BYTES_MAX
            )
        if not there:
            raise BusError(f"{self.where}: {self.topic} {partition} ends before its own end")
        return there.popleft()

    def _differs(self, partition: int) -> ConfigurationError:
        return ConfigurationError(
            f"{self.where}: {self.topic} {partition} holds something else from offset "
            f"{self._at[partition]} on than the records to be written; it was begun from another "
            "source, with another filter, or by another program: restart in an empty place"
        )
