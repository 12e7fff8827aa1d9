"""The contract of a bus, which keeps each topic as a partitioned, durable log of bytes, read from
explicit positions. One conformance suite tests all back ends, which refuse the same input with the
same texts (`check_…`).

Reading list: after `streams/records.py`, before `streams/writer.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from rollstream.streams.records import Position
from rollstream.streams.topics import Topic

LEASE_S = 10.0  # a member of a consumer group loses its partitions if it does not poll for so long


class AppendEntry(msgspec.Struct, frozen=True, gc=False):
    """A `value` of None is a tombstone, which marks the key as deleted. Without `timestamp_ms` the
    bus's clock stamps the record; a copy of a record has the timestamp of the original.
    """

    key: bytes
    value: bytes | None
    partition: int | None = None
    timestamp_ms: int | None = None


# Readers create many: a msgspec struct takes 0.1 µs, a frozen dataclass 0.6 µs.
class Message(msgspec.Struct, frozen=True, gc=False):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes | None


class GroupReader(Protocol):
    """The member's partitions may change between polls."""

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        """Returns records from the group's committed positions on; [] if nothing came within
        `wait_s`. `records_max=0` reads nothing and only keeps the membership alive.
        """
        ...

    def commit(self, before: Mapping[int, int] | None = None) -> None:
        """Mark polled records as processed; of a partition in `before` only those below that
        offset. Partitions that were lost meanwhile are not committed: their new owner reads those
        records again.
        """
        ...

    def pass_lost(self) -> dict[int, int]:
        """Continues after `poll` raised `PositionLost`: the next `poll` begins at the first kept
        record, and the next `commit` stores the new positions. Returns the number of skipped
        offsets by partition.
        """
        ...

    def close(self) -> None: ...


class Bus(Protocol):
    """Keeps the topics of a run. All back ends give these guarantees:

    * A record whose offset `append` returned is durable and keeps its place in its partition. After
      an error the append is in doubt: its records may be in the log or not. Readers recognise a
      repeated append by its sequence numbers (invariant 7).
    * `read` returns records in partition order and skips none. A position below the first kept
      record raises `PositionLost`.
    * Compaction keeps at least the newest record per key; a tombstone (`value=None`) may remove the
      key.
    * Only `truncate`, a topic's `retention_s` and compaction remove records. The end of a partition
      never moves back. Its last record stays, except that a Kafka broker may remove it after
      `retention_s`.
    * Consumer groups only spread partitions over members. No decision of a run depends on them.

    A wait for new records ends after the `wait_s` of the caller.
    """

    def create(self, topics: Sequence[Topic]) -> None:
        """Creates the missing topics; an existing one with other settings raises `BusError`, which
        names the difference.
        """
        ...

    def settings(self, topic: str) -> Topic: ...

    def partitions(self, topic: str) -> int: ...

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        """Append the entries and return their offsets in the same order, once all are durable."""
        ...

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
        """Returns records of each partition from the given offset on, one after another: at least
        one if any exists, whatever its size; [] if none was appended within `wait_s`. Unless
        `exact`, [] may also mean that existing records have not arrived yet: for polling loops,
        because an exact [] costs a request to the brokers.
        """
        ...

    def begin(self, topic: str) -> dict[int, int]:
        """Returns the first kept offset, which equals the end if the partition holds no record."""
        ...

    def end(self, topic: str) -> dict[int, int]:
        """Returns the offset that the next record of each partition will have."""
        ...

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        """Store positions of a consumer group, each an offset with the fence there (`fence.py`)."""
        ...

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        """Returns the group's stored positions; partitions that were never committed are absent."""
        ...

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        """Remove records below these offsets, but never a partition's last record."""
        ...

    def join(self, group: str, topic: str, member: str) -> GroupReader: ...

    def close(self) -> None: ...
