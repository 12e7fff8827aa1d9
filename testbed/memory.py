"""The contracts of bus and object store within one process, for tests and stepped trials.
Thread-safe; records and objects end with the process.

One lock guards the bus, and readers wait on its condition. `clock` stamps records and measures
leases and retention; waits are real seconds.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.deadline import Deadline
from rollstream.errors import ObjectExists, ObjectMissing, SwapLost
from rollstream.storage.stores.base import (
    Data,
    ListedObject,
    ObjectStat,
    check_key,
    check_prefix,
    content_hash,
)
from rollstream.streams.bus import LEASE_S, AppendEntry, GroupReader, Message
from rollstream.streams.bus_checks import (
    check_entries,
    check_position,
    check_same_settings,
    missing_topic,
)
from rollstream.streams.records import Position
from rollstream.streams.sqlite.groups import LeasedGroupReader, PartitionLease, claim_partitions
from rollstream.streams.topics import TOMBSTONE_S, Topic, partition_of


def _offset(message: Message) -> int:
    return message.offset


@dataclass(slots=True)
class _Partition:
    """`rows` ascend in offset and always hold the last record; compaction leaves holes between
    them.
    """

    begin: int = 0
    end: int = 0
    rows: list[Message] = field(default_factory=list[Message])

    def truncate(self, before: int) -> None:
        self.begin = max(self.begin, min(before, self.end - 1))
        del self.rows[: bisect_left(self.rows, self.begin, key=_offset)]

    def expire(self, before_ms: int) -> None:
        fresh = (row.offset for row in self.rows if row.timestamp_ms >= before_ms)
        self.truncate(next(fresh, self.end))

    def compact(self, tombstones_before_ms: int) -> None:
        newest = {row.key: row.offset for row in self.rows}
        last = self.end - 1
        self.rows = [
            row
            for row in self.rows
            if row.offset == last
            or (
                newest[row.key] == row.offset
                and (row.value is not None or row.timestamp_ms >= tombstones_before_ms)
            )
        ]


@dataclass(slots=True)
class _Group:
    """Commits and leases of one group on one topic."""

    committed: dict[int, Position] = field(default_factory=dict[int, Position])
    members: dict[str, float] = field(default_factory=dict[str, float])
    leases: dict[int, PartitionLease] = field(default_factory=dict[int, PartitionLease])


class MemoryBus:
    """See `Bus`; nothing survives the process."""

    def __init__(self, clock: Callable[[], float] = time.time, *, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._changed = threading.Condition()
        self._topics: dict[str, tuple[Topic, list[_Partition]]] = {}
        self._groups: dict[tuple[str, str], _Group] = {}

    def create(self, topics: Sequence[Topic]) -> None:
        with self._changed:
            for topic in topics:
                if topic.name in self._topics:
                    check_same_settings(self._topics[topic.name][0], topic)
                else:
                    rows = [_Partition() for _ in range(topic.partitions)]
                    self._topics[topic.name] = (topic, rows)

    def settings(self, topic: str) -> Topic:
        return self._topic(topic)[0]

    def partitions(self, topic: str) -> int:
        return self._topic(topic)[0].partitions

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        with self._changed:
            settings, partitions = self._topic(topic)
            check_entries(settings, entries)
            now_s = self._clock()
            offsets: list[int] = []
            for entry in entries:
                chosen = entry.partition
                if chosen is None:
                    chosen = partition_of(entry.key, settings.partitions)
                rows = partitions[chosen]
                offsets.append(rows.end)
                at_ms = int(now_s * 1000) if entry.timestamp_ms is None else entry.timestamp_ms
                rows.rows.append(Message(topic, chosen, rows.end, at_ms, entry.key, entry.value))
                rows.end += 1
            self._clean(settings, partitions, now_s)
            self._changed.notify_all()
            return offsets

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        deadline = Deadline(wait_s)
        with self._changed:
            while True:
                messages = self._read_now(topic, positions, records_max, bytes_max)
                if messages or deadline.passed():
                    return messages
                self._changed.wait(deadline.remaining_s())

    def begin(self, topic: str) -> dict[int, int]:
        with self._changed:
            return {number: rows.begin for number, rows in enumerate(self._topic(topic)[1])}

    def end(self, topic: str) -> dict[int, int]:
        with self._changed:
            return {number: rows.end for number, rows in enumerate(self._topic(topic)[1])}

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        with self._changed:
            self._group(group, topic).committed.update(positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        with self._changed:
            return dict(self._group(group, topic).committed)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        with self._changed:
            partitions = self._topic(topic)[1]
            for partition, offset in before.items():
                partitions[partition].truncate(offset)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        return LeasedGroupReader(self, self, group, topic, member)

    def close(self) -> None:
        """Keep the records: other holders of the bus may still read them."""

    # Coordinator (sqlite/groups.py)

    def claim(self, group: str, topic: str, member: str, partitions: int) -> frozenset[int]:
        with self._changed:
            state, now_s = self._group(group, topic), self._clock()
            claimed, released = claim_partitions(
                member, state.members, state.leases, partitions, now_s
            )
            state.members[member] = now_s + self._lease_s
            for partition in released:
                del state.leases[partition]
            for partition in claimed:
                state.leases[partition] = PartitionLease(member, now_s + self._lease_s)
            return claimed

    def commit_held(
        self, group: str, topic: str, member: str, positions: Mapping[int, Position]
    ) -> None:
        with self._changed:
            state = self._group(group, topic)
            for partition, position in positions.items():
                lease = state.leases.get(partition)
                if lease is not None and lease.owner == member:
                    state.committed[partition] = position

    def leave(self, group: str, topic: str, member: str) -> None:
        with self._changed:
            state = self._group(group, topic)
            state.members.pop(member, None)
            for partition, lease in list(state.leases.items()):
                if lease.owner == member:
                    del state.leases[partition]

    def _topic(self, topic: str) -> tuple[Topic, list[_Partition]]:
        if topic not in self._topics:
            raise missing_topic(topic, "this memory bus")
        return self._topics[topic]

    def _group(self, group: str, topic: str) -> _Group:
        return self._groups.setdefault((group, topic), _Group())

    def _read_now(
        self, topic: str, positions: Mapping[int, int], records_max: int, bytes_max: int
    ) -> list[Message]:
        partitions = self._topic(topic)[1]
        messages: list[Message] = []
        for partition, offset in positions.items():
            rows = partitions[partition]
            check_position(topic, partition, offset, rows.begin, rows.end)
            start = bisect_left(rows.rows, offset, key=_offset)
            for row in rows.rows[start : start + records_max - len(messages)]:
                bytes_max -= len(row.key) + len(row.value or b"")
                if bytes_max < 0 and messages:
                    return messages
                messages.append(row)
        return messages

    def _clean(self, topic: Topic, partitions: list[_Partition], now_s: float) -> None:
        for rows in partitions:
            if not rows.rows:
                continue
            if topic.retention_s is not None:
                rows.expire(int((now_s - topic.retention_s) * 1000))
            if topic.cleanup == "compact":
                rows.compact(int((now_s - TOMBSTONE_S) * 1000))


class MemoryStore:
    """The `memory:` store; safe to share between threads; its objects end with the process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> str:
        content = bytes(data)
        with self._lock:
            self._objects[check_key(key)] = content
        return content_hash(content)

    def create(self, key: str, data: Data) -> str:
        content = bytes(data)
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExists(f"object {key} is already in the memory store")
            self._objects[key] = content
        return content_hash(content)

    def swap(self, key: str, data: Data, etag: str) -> str:
        content = bytes(data)
        with self._lock:
            present = self._objects.get(check_key(key))
            if present is None or content_hash(present) != etag:
                raise SwapLost(f"object {key} in the memory store is not the expected {etag}")
            self._objects[key] = content
        return content_hash(content)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        assert 0 <= start <= (start if end is None else end), (key, start, end)
        return self._content(key)[start:end]

    def stat(self, key: str) -> ObjectStat:
        content = self._content(key)
        return ObjectStat(key, len(content), content_hash(content))

    def read(self, key: str) -> tuple[bytes, str]:
        content = self._content(key)
        return content, content_hash(content)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        check_prefix(prefix)
        with self._lock:
            present = sorted(self._objects.items())
        return (ListedObject(key, len(data)) for key, data in present if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def delete_all(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def _content(self, key: str) -> bytes:
        with self._lock:
            content = self._objects.get(check_key(key))
        if content is None:
            raise ObjectMissing(f"no object {key} in the memory store")
        return content
