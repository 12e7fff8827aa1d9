"""Appends records to the log: `publish` and `publish_all` to topics of many writers, `FencedWriter`
to a topic of a single-holder role, with the role's term and sequence numbers (invariant 7).

Reading list: after `streams/bus.py`, before `streams/fence.py`.
"""

import threading
import time
from collections.abc import Sequence

from rollstream.deadline import Deadline
from rollstream.errors import BusError, RecordTooLarge
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.bus_checks import check_entries
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.foreign_text import reason_text
from rollstream.streams.records import Fence, Opened, Position, Record
from rollstream.streams.release import KNOWN_FEATURES, NEEDED_BY_TOPIC, RELEASE
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Address

RETRY_S = 20.0  # for how long a batch in doubt is sent again and again
RETRY_PAUSE_S = 0.1

KeyedRecord = tuple[str, Record] | tuple[str, Record, int]
"""A key and a record, then the partition unless the key chooses it (`partition_of`)."""


def publish(
    bus: Bus, topic: str, key: str, record: Record, partition: int | None = None
) -> Address:
    """Append one record and return its address once it is durable. See `publish_all` for errors."""
    keyed: KeyedRecord = (key, record) if partition is None else (key, record, partition)
    return publish_all(bus, topic, [keyed])[0]


def publish_all(bus: Bus, topic: str, records: Sequence[KeyedRecord]) -> list[Address]:
    """Appends records, durable on return. Raises `RecordTooLarge` before any is written, and
    `BusError` with the records in doubt: a caller that sends them again may append a record twice.
    """
    partitions = bus.partitions(topic)
    return append_encoded(bus, topic, [_encoded_entry(keyed, partitions) for keyed in records])


def append_encoded(bus: Bus, topic: str, entries: Sequence[AppendEntry]) -> list[Address]:
    """Append encoded records as `publish_all` does; nothing for none."""
    return _addresses(entries, bus.append(topic, entries)) if entries else []


def encode_each(
    bus: Bus, topic: str, records: Sequence[KeyedRecord]
) -> tuple[list[AppendEntry], dict[int, str]]:
    """Returns the encoded records, and by index the reasons why the topic cannot hold the
    others.
    """
    partitions, settings = bus.partitions(topic), bus.settings(topic)
    entries: list[AppendEntry] = []
    refused: dict[int, str] = {}
    for index, keyed in enumerate(records):
        try:
            entry = _encoded_entry(keyed, partitions)
            check_entries(settings, [entry])
        except (ValueError, RecordTooLarge) as error:
            refused[index] = reason_text(error)
        else:
            entries.append(entry)
    return entries, refused


def _encoded_entry(keyed: KeyedRecord, partitions: int) -> AppendEntry:
    key, record, *explicit_partition = keyed
    return AppendEntry(
        key.encode(), encode(record), _partition(key.encode(), explicit_partition, partitions)
    )


class FencedWriter:
    """One term of a role, one topic; threads may share it. `open` must be called first."""

    def __init__(
        self, bus: Bus, topic: str, role: str, term: int, *, retry_s: float = RETRY_S
    ) -> None:
        self._bus = bus
        self._topic = bus.settings(topic)
        self._role = role
        self._term = term
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._sequences = [0] * self._topic.partitions
        self._ends = [0] * self._topic.partitions
        self._broken = ""

    def open(self) -> dict[int, int]:
        """Appends `Opened`, from which on records of lower terms are void. Returns the offset of
        `Opened` by partition; before the role acts, it must read the topic up to these offsets.
        """
        needs = NEEDED_BY_TOPIC.get(self._topic.name, ())
        opened = Opened(self._role, self._term, RELEASE, needs, tuple(sorted(KNOWN_FEATURES)))
        partitions = range(self._topic.partitions)
        at = self.append([(f"opened/{self._role}", opened, number) for number in partitions])
        return {address.partition: address.offset for address in at}

    def append(self, records: Sequence[KeyedRecord]) -> list[Address]:
        """Appends in this order within each partition; all are durable on return. Raises
        `RecordTooLarge` before any is written. Raises `BusError` if they stay in doubt, and then at
        every later call.

        If a batch was appended twice, the addresses may be those of the second copies, which have
        the same bytes.
        """
        with self._lock:
            if self._broken:
                raise BusError(
                    f"{self._topic.name}: an earlier append of {self._role} term {self._term} "
                    f"stayed in doubt ({self._broken}); exit and open a new term"
                )
            sequences = self._sequences.copy()
            entries = [self._entry(keyed, sequences) for keyed in records]
            check_entries(self._topic, entries)
            at = _addresses(entries, self._append_surely(entries))
            self._sequences = sequences
            for address in at:
                self._ends[address.partition] = address.offset + 1
            return at

    def positions(self) -> dict[int, Position]:
        """Returns the positions after all records that this writer has appended, with the fence
        there.
        """
        with self._lock:
            return {
                partition: Position(end, Fence(self._term, sequence))
                for partition, (end, sequence) in enumerate(
                    zip(self._ends, self._sequences, strict=True)
                )
            }

    def _entry(self, keyed: KeyedRecord, sequences: list[int]) -> AppendEntry:
        key, record, *explicit_partition = keyed
        if self._topic.cleanup == "compact":
            # Otherwise compaction would remove a record of one term for one of another.
            key = f"{key}/{self._term}"
        partition = _partition(key.encode(), explicit_partition, self._topic.partitions)
        envelope = Envelope(self._role, self._term, sequences[partition])
        sequences[partition] += 1
        return AppendEntry(key.encode(), encode(record, envelope), partition)

    def _append_surely(self, entries: Sequence[AppendEntry]) -> list[int]:
        deadline = Deadline(self._retry_s)
        while True:
            try:
                # The same bytes again, so that readers drop the repeat (`fence.py`).
                return self._bus.append(self._topic.name, entries)
            except RecordTooLarge:
                raise
            except BusError as error:
                if deadline.passed():
                    # If the batch is missing, the next number would be a gap; if it is there, the
                    # same number would be a repeat. A new term counts from 0.
                    self._broken = str(error)
                    raise
            time.sleep(min(RETRY_PAUSE_S, deadline.remaining_s()))


def _partition(key: bytes, explicit_partition: Sequence[int], partitions: int) -> int:
    return explicit_partition[0] if explicit_partition else partition_of(key, partitions)


def _addresses(entries: Sequence[AppendEntry], offsets: Sequence[int]) -> list[Address]:
    return [
        # Entries of a writer always name their partition.
        Address(entry.partition or 0, offset)
        for entry, offset in zip(entries, offsets, strict=True)
    ]
