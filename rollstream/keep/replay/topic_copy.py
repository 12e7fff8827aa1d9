"""Copies a run's topics to another bus: the same bytes in the same partitions and order, at new
offsets. After a kill the same calls resume. A topic of a single writer is copied completely or not
at all; compacted topics are not copied (docs/reference/replay.md).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from rollstream.errors import BusError, ConfigurationError
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.fence import TRUNCATED_GROUP
from rollstream.streams.reader import from_begin, read_range
from rollstream.streams.records import Fence, Position
from rollstream.streams.topics import DEAD, catalogue

BEGUN_GROUP = "replay"
"""Consumer group whose position in a topic marks it as begun by a replay."""
RECORDS_MAX, BYTES_MAX = 512, 4 << 20  # the most that one append writes and one read returns


def refuse_foreign_records(bus: Bus, topics: Sequence[str], where: str) -> None:
    """Raises `ConfigurationError` if one of these topics holds records and no replay began it;
    `where` names the bus.
    """
    for topic in topics:
        records = sum(bus.end(topic).values())
        if records and not bus.committed(BEGUN_GROUP, topic):
            raise ConfigurationError(
                f"{where} holds {records} records in {topic} already, which no replay wrote; give "
                "a bus where this topic is empty (another folder, another prefix)"
            )


def mark_begun(bus: Bus, topic: str) -> None:
    """Marks a topic as begun by a replay, before the replay appends to it."""
    partitions = range(bus.partitions(topic))
    bus.commit(BEGUN_GROUP, topic, dict.fromkeys(partitions, Position()))


class TopicHash:
    """A running hash over the keys and values of a topic, in order within each partition,
    independent of offsets and read batches.
    """

    def __init__(self) -> None:
        self._by: dict[int, xxhash.xxh3_128] = {}
        self.records = 0

    def add(self, partition: int, key: bytes, value: bytes | None) -> None:
        size = -1 if value is None else len(value)
        hasher = self._by.setdefault(partition, xxhash.xxh3_128())
        # So that the same bytes in other keys and values hash differently (-1: a tombstone).
        hasher.update(f"{len(key)} {size} ".encode())
        hasher.update(key)
        hasher.update(value or b"")
        self.records += 1

    def digest(self) -> str:
        """Returns xxh3-128, in hex, over number and digest of each partition that has records, in
        the order of the numbers.
        """
        topic_hasher = xxhash.xxh3_128()
        for partition, hasher in sorted(self._by.items()):
            topic_hasher.update(f"{partition} ".encode() + hasher.digest())
        return topic_hasher.hexdigest()


@dataclass(slots=True)
class ResumedTopicWriter:
    """Writes a topic that may already hold the first records, left by a killed writer. The caller
    passes all records, from the first on, to `write`, then calls `close`. Records in the topic are
    compared byte for byte (`already` counts them), the others appended.
    """

    bus: Bus
    topic: str
    where: str
    already: int = 0
    _ends: dict[int, int] = field(default_factory=dict[int, int])  # at the begin, by partition
    _at: dict[int, int] = field(default_factory=dict[int, int])  # records passed, by partition
    _there: dict[int, deque[Message]] = field(default_factory=dict[int, deque[Message]])
    """Records that were read and are not compared yet, by partition."""
    _batch: list[AppendEntry] = field(default_factory=list[AppendEntry])
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._ends = self.bus.end(self.topic)
        self._at = dict.fromkeys(self._ends, 0)

    def write(self, entry: AppendEntry) -> None:
        """Writes the next record of the partition that `entry` names, or compares it with the
        topic's. Raises `ConfigurationError` if that one is different.
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
        """Appends the rest of the batch. Raises `ConfigurationError` if the topic held more records
        than were passed.
        """
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


HISTORY = ("admissions", "trajectories", "annotations", "applied", "ledger")
"""The topics that are copied by default: those that an archive keeps."""


@dataclass(frozen=True, slots=True)
class CopiedTopic:
    """A copied topic: `records` and `content_hash` (`TopicHash`) as read from the source and
    verified in the copy. `left_out` counts filtered records, `already` copied ones that the target
    held before, `forgotten` the offsets before the first record that the source still has.
    """

    topic: str
    records: int
    content_hash: str
    left_out: int
    already: int
    forgotten: int


Keep = Callable[[Message], bool]
"""Whether to copy a record."""


def prepare_target(
    source: Bus, target: Bus, topics: Sequence[str], where: str, keep: Keep | None
) -> None:
    """Creates the topics in the target, which errors name as `where`, and `dead`, to which readers
    of the copy move unreadable records. Raises `ConfigurationError` for a topic that cannot be
    copied or holds records that no replay wrote.
    """
    for topic in topics:
        settings = source.settings(topic)
        if settings.cleanup == "compact":
            raise ConfigurationError(
                f"{topic} is compacted: it holds present values, no history, and is not copied"
            )
        # A part of a single writer's topic would look like a log that lost records.
        if settings.writer and keep is not None:
            raise ConfigurationError(
                f"{topic} is numbered by its single writer ({settings.writer}): a part of it would "
                "be a log that lost records; copy it without --where, or choose other topics"
            )
    beside = [topic for topic in catalogue() if topic.name == DEAD]
    try:
        target.create([*(source.settings(topic) for topic in topics), *beside])
    except BusError as error:
        raise ConfigurationError(
            f"{where} has these topics with other settings ({error}); give another bus"
        ) from error
    refuse_foreign_records(target, topics, where)


def count_records(source: Bus, topics: Sequence[str]) -> int:
    return sum(
        end - source.begin(topic)[partition]
        for topic in topics
        for partition, end in source.end(topic).items()
    )


def copy_topic(
    source: Bus,
    target: Bus,
    topic: str,
    where: str,
    keep: Keep | None,
    on_read: Callable[[int], None],
) -> CopiedTopic:
    """Copies a topic that `prepare_target` created up to its present end and verifies the copy.
    `on_read` gets the number of records of each batch. Raises `BusError` if the copy differs from
    what was written.

    1. Mark the topic as begun.
    2. Commit the source's fences at the copy's first records.
    3. Copy the records, void ones and `Opened` included.
    4. Read the whole copy and compare its hash.
    """
    starts, ends = from_begin(source, topic), source.end(topic)
    mark_begun(target, topic)  # 1
    _set_fences(target, topic, starts)  # 2
    contents, left_out = TopicHash(), 0
    writer = ResumedTopicWriter(target, topic, where)
    for partition, start in starts.items():
        for messages in read_range(source, topic, partition, start.offset, ends[partition]):
            for message in messages:
                if keep is not None and not keep(message):
                    left_out += 1
                    continue
                contents.add(partition, message.key, message.value)
                writer.write(AppendEntry(message.key, message.value, partition))  # 3
            on_read(len(messages))
    writer.close()
    target_hash = hash_topic(target, topic)
    if target_hash.digest() != contents.digest():  # 4
        raise BusError(
            f"{where}: {topic} differs from what was written; does another program write there?"
        )
    forgotten = sum(start.offset for start in starts.values())
    digest = contents.digest()
    return CopiedTopic(topic, contents.records, digest, left_out, writer.already, forgotten)


def hash_topic(bus: Bus, topic: str) -> TopicHash:
    ends = bus.end(topic)
    contents = TopicHash()
    for partition, first in bus.begin(topic).items():
        for messages in read_range(bus, topic, partition, first, ends[partition]):
            for message in messages:
                contents.add(partition, message.key, message.value)
    return contents


def _set_fences(target: Bus, topic: str, starts: dict[int, Position]) -> None:
    # The `Opened` that set the fence of the first kept record may be truncated. With the fence,
    # readers of copy and source treat the same records as void (invariant 7).
    fences = {p: Position(0, at.fence) for p, at in starts.items() if at.fence != Fence()}
    if fences:
        target.commit(TRUNCATED_GROUP, topic, fences)
