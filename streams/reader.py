"""Reads a topic's records in order from explicit positions, the same way for every role. Void
records and bytes that are not a record are skipped and counted; the archive and the commands that
show a log use `classify_message`, because they keep or show those too.

Reading list: after `streams/fence.py`, before `storage/leases.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from rollstream.deadline import Deadline
from rollstream.errors import BusError, DecodeError, NewerRelease, PositionLost
from rollstream.streams.bus import Bus, Message
from rollstream.streams.classified import classify_message
from rollstream.streams.codec import Decoded, Envelope, decode, record_hash
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.fence import TRUNCATED_GROUP, later_position
from rollstream.streams.records import Opened, Position, Record
from rollstream.streams.release import upgrade_advice
from rollstream.streams.values import Address

RANGE_BYTES = 4 << 20  # of records that one read of `read_range` returns
NEAR_OFFSETS = 512  # addresses within this many offsets of the first share one read


class Received(msgspec.Struct, frozen=True, gc=False):
    """The ledger names a record by its address and the `hash` of its encoded bytes, `data`."""

    topic: str
    address: Address
    timestamp_ms: int
    key: str
    record: Record
    envelope: Envelope | None
    data: bytes

    def __repr__(self) -> str:
        return f"Received({self.topic!r}, {self.address}, {self.key!r}, {self.record!r})"

    @property
    def hash(self) -> str:
        return record_hash(self.data)


def from_begin(bus: Bus, topic: str) -> dict[int, Position]:
    """Returns the position that `fence.truncate` committed last, or the topic's begin if that is
    later.
    """
    committed = bus.committed(TRUNCATED_GROUP, topic)
    begin = bus.begin(topic).items()
    return {p: later_position(Position(offset), committed.get(p)) for p, offset in begin}


def from_end(bus: Bus, topic: str) -> dict[int, Position]:
    """Returns positions with empty fences: the first record that is read sets its partition's."""
    return {partition: Position(offset) for partition, offset in bus.end(topic).items()}


def read_at(bus: Bus, topic: str, address: Address) -> Received:
    """Returns the record, even a void one. Raises `PositionLost` if it was truncated or compacted
    away.
    """
    return read_all_at(bus, topic, [address])[0]


def read_all_at(bus: Bus, topic: str, addresses: Iterable[Address]) -> list[Received]:
    """Returns the records at these addresses, in the same order; raises the errors of `read_at`."""
    requested = list(addresses)
    records: dict[Address, Received] = {}
    for partition in {address.partition for address in requested}:
        offsets = sorted({at.offset for at in requested if at.partition == partition})
        while offsets:
            # Near addresses share one forward read: a read per record costs a seek and a fetch
            # each.
            near = [offset for offset in offsets if offset - offsets[0] < NEAR_OFFSETS]
            records_max = near[-1] - near[0] + 1
            messages = bus.read(topic, {partition: near[0]}, records_max=records_max)
            by_offset = {message.offset: message for message in messages}
            if near[0] not in by_offset:
                at = Address(partition, near[0])
                raise PositionLost(f"{topic}: no record at {at}; it was compacted away")
            there = [offset for offset in near if offset in by_offset]
            records |= {Address(partition, at): _received_at(topic, by_offset[at]) for at in there}
            offsets = [offset for offset in offsets if offset not in by_offset]
    return [records[address] for address in requested]


def read_range(
    bus: Bus, topic: str, partition: int, start: int, end: int
) -> Iterator[Sequence[Message]]:
    """Yields the records of a partition with offsets from `start` to before `end`, in batches.
    Raises `BusError` if the partition ends before.
    """
    at = start
    while at < end:
        read = bus.read(topic, {partition: at}, bytes_max=RANGE_BYTES)
        if not read:
            raise BusError(f"{topic} {partition}: ends at {at}, expected to read to {end}")
        at = read[-1].offset + 1
        yield [message for message in read if message.offset < end]


def _received_at(topic: str, message: Message) -> Received:
    if message.value is None:
        raise DecodeError(f"{topic}: tombstone at {message.partition}:{message.offset}")
    return _received(message, decode(message.value), message.value)


class TopicReader:
    """A poll that raises moves no position.

    Void records and tombstones are skipped; `Opened` records are returned only if `with_opened`. At
    a record that this release does not understand (`ClassifiedMessage.newer`) every poll raises
    `NewerRelease`.

    `dead_letters`, which one reader of each topic has, gets the messages that are not a record
    before any later record is returned.
    """

    def __init__(
        self,
        bus: Bus,
        topic: str,
        positions: Mapping[int, Position],
        *,
        with_opened: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        dead_letters: DeadLetterWriter | None = None,
    ) -> None:
        settings = bus.settings(topic)
        self.positions = dict(positions)
        self.dead = 0
        self.void = 0
        self.lost = 0
        self._bus = bus
        self._topic = topic
        self._fenced = bool(settings.writer)
        self._compacted = settings.cleanup == "compact"
        self._with_opened = with_opened
        self._release = ""  # release of the newest term read
        self._monotonic = monotonic
        self._dead_letters = dead_letters
        self._first = 0  # the partition read first rotates, so that a full one starves no other

    def poll(
        self, wait_s: float = 0.0, records_max: int = 512, *, exact: bool = True
    ) -> list[Received]:
        """Returns [] if none came within `wait_s`, or without `exact`, if existing records have not
        arrived yet (`Bus.read`).
        """
        deadline = Deadline(wait_s, self._monotonic)
        while True:
            messages = self._bus.read(
                self._topic,
                self._offsets(),
                records_max=records_max,
                wait_s=deadline.remaining_s(),
                exact=exact,
            )
            received = self._take(messages)
            if received or not messages or deadline.passed():
                return received

    def follow(self, wait_s: float = 0.0, records_max: int = 512) -> list[Received]:
        """Calls `poll` without `exact`: [] does not mean that the end is reached."""
        return self.poll(wait_s, records_max, exact=False)

    def read_to(self, ends: Mapping[int, int]) -> list[Received]:
        """Returns the records below the offsets `ends`, which the log must reach; later records
        stay unread.
        """
        return [received for batch in self.batches_to(ends) for received in batch]

    def batches_to(self, ends: Mapping[int, int]) -> Iterator[list[Received]]:
        """Yield the records of `read_to` in batches of bounded size."""
        while True:
            below = {p: at.offset for p, at in self.positions.items() if at.offset < ends.get(p, 0)}
            if not below:
                return
            messages = self._bus.read(self._topic, below)
            if not messages:
                raise BusError(f"{self._topic} ends before the requested end {dict(ends)}")
            messages_below = [m for m in messages if m.offset < ends[m.partition]]
            received = self._take(messages_below)
            for message in messages:
                # Compaction may have removed the last records below the requested end: then the
                # next message is beyond the end, and the position moves to the end itself.
                at = self.positions[message.partition]
                if message.offset >= ends[message.partition] > at.offset:
                    self.positions[message.partition] = Position(ends[message.partition], at.fence)
            yield received

    @property
    def topic(self) -> str:
        return self._topic

    def behind(self) -> int:
        """Returns the number of offsets from `positions` to the topic's end. Thread-safe."""
        ends = self._bus.end(self._topic)
        return sum(max(0, ends[p] - at.offset) for p, at in dict(self.positions).items())

    def _offsets(self) -> dict[int, int]:
        partitions = list(self.positions)
        if partitions:
            self._first = (self._first + 1) % len(partitions)
            partitions = partitions[self._first :] + partitions[: self._first]
        return {partition: self.positions[partition].offset for partition in partitions}

    def _take(self, messages: list[Message]) -> list[Received]:
        received: list[Received] = []
        fences = {partition: at.fence for partition, at in self.positions.items()}
        unreadable: list[tuple[Message, str]] = []
        void = 0
        for message in messages:
            value = message.value
            if value is None:
                continue
            fences[message.partition], classified = classify_message(
                value,
                fences[message.partition],
                topic=self._topic,
                fenced=self._fenced,
                compacted=self._compacted,
            )
            # If it were skipped, an older dispatch could miss a decision in the ledger and generate
            # a group again.
            if classified.newer:
                where = f"{self._topic}/{message.partition} offset {message.offset}"
                raise NewerRelease(f"{where}: {classified.newer}; {upgrade_advice(self._release)}")
            if classified.decoded is not None and isinstance(classified.decoded.record, Opened):
                self._release = classified.decoded.record.release
            if classified.void:
                void += 1
            elif classified.reason or classified.decoded is None:
                unreadable.append((message, classified.reason))
            elif self._with_opened or not isinstance(classified.decoded.record, Opened):
                received.append(_received(message, classified.decoded, value))
        # Positions and counts change only after all messages were classified and dead letters
        # appended.
        if self._dead_letters is not None:
            self._dead_letters.append(unreadable)
        self.dead += len(unreadable)
        self.void += void
        for message in messages:
            position = Position(message.offset + 1, fences[message.partition])
            self.positions[message.partition] = position
        return received


def _received(message: Message, decoded: Decoded, value: bytes) -> Received:
    return Received(
        message.topic,
        Address(message.partition, message.offset),
        message.timestamp_ms,
        message.key.decode(errors="replace"),
        decoded.record,
        decoded.envelope,
        value,
    )
