"""Records of one topic that were read and are in no file yet, and the choice of the partition whose
file is due. No I/O.

A partition's pending records are always consecutive. A file ends before the first record of a later
day. A record of an earlier day (a clock that went back) does not end it, so that clocks that
disagree around midnight give two files and not hundreds.
"""

from collections.abc import Mapping, Sequence

from rollstream.storage.archive.names import utc_day, message_bytes
from rollstream.streams.bus import Message


class PendingRecords:
    """Pending records of one partition, oldest first. `since_s` is the time at which the first was
    read, `bytes` counts keys and values.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.bytes = 0
        self.messages: list[Message] = []
        self._cut: int | None = None  # index of the first record of a later day

    @property
    def spans_days(self) -> bool:
        return self._cut is not None

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self.bytes += message_bytes(message)
        if self._cut is None and _is_later_day(message, self.messages[0]):
            self._cut = len(self.messages) - 1

    def next_file(self) -> Sequence[Message]:
        """The records of the next file: those before the first of a later day."""
        return self.messages[: self._cut]

    def drop_below(self, before: int) -> None:
        """Drop the records below this offset."""
        kept = self.messages[max(0, before - self.messages[0].offset) :]
        self.messages, self.bytes, self._cut = [], 0, None
        for message in kept:
            self.add(message)


def _is_later_day(message: Message, first: Message) -> bool:
    return utc_day(message.timestamp_ms) > utc_day(first.timestamp_ms)


def due_partition(pending: Mapping[int, PendingRecords], roll_bytes: int, roll_s: float, now_s: float) -> int | None:
    """The partition whose file is to be written now, None if no file is due. A file is due if its
    day is over or its first record waited for `roll_s`; if all partitions together hold
    `roll_bytes`, the fullest is due.
    """
    for partition, held in pending.items():
        if held.spans_days or now_s - held.since_s >= roll_s:
            return partition
    if sum(held.bytes for held in pending.values()) >= roll_bytes:
        return max(pending, key=lambda partition: pending[partition].bytes)
    return None
