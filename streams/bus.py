"""The bus contract: a partitioned, durable log of bytes with explicit positions. Back ends stand
beside this file.

Guarantees, the same on every back end (one conformance suite, `tests/streams/`):

* What `append` returned offsets for is durable and stays in its partition's order; an error leaves
  it in doubt, and who sends it again is recognised by its sequence number (invariant 7).
* `read` gives records in partition order, none skipped; a position below what is kept raises
  `PositionLost`.
* Compaction keeps at least the newest record per key (a tombstone, `value=None`, may remove the
  key), no more is promised.
* Nothing is truncated except by `truncate`, by a topic's `retention_s`, or by compaction; the last
  record of a partition always stays, so its end never moves back.
* Consumer groups only spread partitions, they decide nothing.

Every wait has a bound given by the caller.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from streams.records import Position
from streams.topics import Topic


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One record to append; `value` None is a tombstone; without `partition` the key chooses it
    (`partition_of`).
    """

    key: bytes
    value: bytes | None
    partition: int | None = None


class Message(msgspec.Struct, frozen=True, gc=False):
    """One record as read; a msgspec struct because readers make many (0.1 µs; a frozen dataclass
    takes 0.6).
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes | None


class GroupReader(Protocol):
    """One member of a consumer group on one topic; partitions come and go between polls."""

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        """Records of the partitions held now, from the group's commits on; [] when
        `wait_s` passed. `records_max` 0 reads nothing: it says that the member lives while it works
        on what it has.
        """
        ...

    def commit(self) -> None:
        """Everything that `poll` returned was processed; partitions lost meanwhile are left to
        their new owner.
        """
        ...

    def pass_lost(self) -> dict[int, int]:
        """After `PositionLost`: go on at the begin of what is kept. Returns by partition how many
        offsets are passed over; the next `commit` stores it, as a member's.
        """
        ...

    def close(self) -> None:
        """Leave the group; partitions are free at once."""
        ...


class Bus(Protocol):
    def create(self, topics: Sequence[Topic]) -> None:
        """Create what is missing; an existing topic with other settings raises `BusError` and names
        the difference.
        """
        ...

    def settings(self, topic: str) -> Topic:
        """The settings that the topic was created with."""
        ...

    def partitions(self, topic: str) -> int: ...

    def append(self, topic: str, entries: Sequence[Entry]) -> list[int]:
        """Offsets, in the order of `entries`, once all are durable."""
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
        """Records from each partition's offset on, partition after partition; at least one if there
        is any, whatever its size; [] when none came within `wait_s`.

        Unless `exact`, [] may also mean that what lies there has not arrived yet: for loops that
        look again soon, because over a network an exact [] costs a question to the brokers.
        """
        ...

    def begin(self, topic: str) -> dict[int, int]:
        """First kept offset per partition (equals the end when the partition never held
        a record).
        """
        ...

    def end(self, topic: str) -> dict[int, int]:
        """Offset that the next record of each partition will have."""
        ...

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        """Store the group's positions, each with the fence at it."""
        ...

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        """Any group's stored positions; partitions never committed are absent."""
        ...

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        """Forget records below these offsets, but never a partition's last record."""
        ...

    def join(self, group: str, topic: str, member: str) -> GroupReader: ...

    def close(self) -> None: ...
