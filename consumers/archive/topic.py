"""Archives one topic (`TopicArchive`): each record exactly once, even if several archivers run
(docs/reference/archive.md, Exactly once).

This depends on file names alone: a file is named by its first offset, an archiver begins each where
another one ended, and the store's `create` has one winner, so files of a partition do not overlap.
The lease only avoids duplicate work.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.consumers.settings import ArchiveSettings
from rollstream.errors import BusError, ObjectExists, ObjectMissing, PositionLost, SequenceGap
from rollstream.storage.archive.file_names import (
    archive_key,
    current_files,
    message_bytes,
    parse_archive_key,
    utc_day,
)
from rollstream.storage.archive.reading import LISTINGS_MAX, FileEnd, file_end, partition_ends
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus, Message
from rollstream.streams.fence import ARCHIVE_GROUP
from rollstream.streams.reader import from_begin
from rollstream.streams.records import Position

log = logging.getLogger(__name__)


class PendingRecords:
    """Read and in no file yet, consecutive, oldest first. `since_s` is when the first was read,
    `bytes` counts keys and values.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.bytes = 0
        self.messages: list[Message] = []
        # A record of an earlier day does not end a file: writers whose clocks disagree around
        # midnight cause two files, not hundreds.
        self._cut: int | None = None  # index of the first record of a later day

    @property
    def spans_days(self) -> bool:
        """Whether a record of a later day was read: the first file is complete."""
        return self._cut is not None

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self.bytes += message_bytes(message)
        if self._cut is None and _is_later_day(message, self.messages[0]):
            self._cut = len(self.messages) - 1

    def next_file(self) -> Sequence[Message]:
        return self.messages[: self._cut]

    def drop_below(self, before: int) -> None:
        remaining = self.messages[max(0, before - self.messages[0].offset) :]
        self.messages, self.bytes, self._cut = [], 0, None
        for message in remaining:
            self.add(message)


def _is_later_day(message: Message, first: Message) -> bool:
    return utc_day(message.timestamp_ms) > utc_day(first.timestamp_ms)


def due_partition(
    pending: Mapping[int, PendingRecords], roll_bytes: int, roll_s: float, now_s: float
) -> int | None:
    """The partition whose file is due: a record of a later day follows, or its first record has
    waited for `roll_s`; once all partitions hold `roll_bytes`, the fullest one.
    """
    for partition, records in pending.items():
        if records.spans_days or now_s - records.since_s >= roll_s:
            return partition
    if sum(records.bytes for records in pending.values()) >= roll_bytes:
        return max(pending, key=lambda partition: pending[partition].bytes)
    return None


READ_BYTES, READ_RECORDS = 16 << 20, 8192  # the most that one read returns


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file, without `is_own` another archiver's, with the same records."""

    topic: str
    key: str
    records: int
    bytes: int
    seconds: float
    is_own: bool


class TopicArchive:
    """Call `start` first, then `advance` repeatedly, and `finish`. `on_file` gets each file."""

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        run: str,
        topic: str,
        settings: ArchiveSettings,
        monotonic: Callable[[], float] = time.monotonic,
        on_file: Callable[[WrittenFile], None] = lambda file: None,
    ) -> None:
        self._bus, self._store = bus, store
        self._run, self._topic = run, topic
        self._settings = settings
        self._monotonic = monotonic
        self._on_file = on_file
        self._archived: dict[int, Position] = {}
        self._next: dict[int, int] = {}
        self._pending: dict[int, PendingRecords] = {}

    def start(self) -> None:
        """Continues after each partition's last file, or at the log's first record. Raises
        `PositionLost` if the log is truncated beyond the last file.
        """
        # Read before the files are listed: records truncated in between are then in a listed file.
        begins = from_begin(self._bus, self._topic)
        ends = partition_ends(self._store, self._run, self._topic)
        for partition, begin in begins.items():
            where = f"{self._topic}/{partition}"
            if partition in ends:
                self._archived[partition] = _position_after(ends[partition])
                _check_no_gap(where, self._archived[partition].offset, begin.offset)
            else:
                self._archived[partition] = begin
                if begin.offset:
                    log.warning("%s: records below %d are not archived", where, begin.offset)
        self._next = {p: at.offset for p, at in self._archived.items()}
        self._bus.commit(ARCHIVE_GROUP, self._topic, self._archived)

    def advance(self, *, exact: bool = False) -> bool:
        """Reads once and writes due files; returns False if no new record was read, which without
        `exact` may mean that records have not arrived yet (`Bus.read`).
        """
        has_read = self._read(exact)
        now_s = self._monotonic()
        s = self._settings
        while (
            partition := due_partition(self._pending, s.roll_bytes, s.roll_s, now_s)
        ) is not None:
            self._write(partition)
        return has_read

    def finish(self) -> None:
        """Archives everything up to the present end, however small the files."""
        ends = self._bus.end(self._topic)
        while any(self._next[partition] < end for partition, end in ends.items()):
            if not self.advance(exact=True):
                raise BusError(f"{self._topic}: no records arrive before the ends {ends}")
        while self._pending:
            self._write(next(iter(self._pending)))

    def pending(self) -> int:
        """Returns records that were read and are in no file yet; thread-safe."""
        return sum(len(records.messages) for records in list(self._pending.values()))

    def behind(self) -> int:
        """Returns records of the log that are in no file yet; thread-safe."""
        ends = self._bus.end(self._topic)
        return sum(max(0, ends[p] - at.offset) for p, at in dict(self._archived).items())

    def _read(self, exact: bool) -> bool:
        positions = self._rotated()
        try:
            messages = self._bus.read(
                self._topic,
                positions,
                records_max=READ_RECORDS,
                bytes_max=READ_BYTES,
                exact=exact,
            )
        except PositionLost as error:
            self._skip_truncated(error)
            return True
        now_s = self._monotonic()
        for message in messages:
            if message.offset != self._next[message.partition]:
                raise SequenceGap(
                    f"{self._topic}/{message.partition}: the log gives offset {message.offset} "
                    f"where {self._next[message.partition]} is next; the log lost records"
                )
            if message.partition not in self._pending:
                self._pending[message.partition] = PendingRecords(now_s)
            self._pending[message.partition].add(message)
            self._next[message.partition] = message.offset + 1
        return bool(messages)

    def _skip_truncated(self, error: PositionLost) -> None:
        ends = partition_ends(self._store, self._run, self._topic)
        for partition, begin in self._bus.begin(self._topic).items():
            if self._next[partition] >= begin:
                continue
            # An archiver that was suspended while its successor archived and the trainer truncated
            # has lost no record: it continues after the other's files.
            if partition not in ends or ends[partition].last + 1 < begin:
                text = f"records were truncated before they were archived: {error}"
                raise PositionLost(text) from error
            self._continue_at(partition, _position_after(ends[partition]))

    def _rotated(self) -> dict[int, int]:
        # Another partition is first in each read, so that none starves.
        first, *others = self._next.items()
        self._next = dict([*others, first])
        return self._next

    def _write(self, partition: int) -> None:
        # (1) Create the file; (2) list the files of that day, and continue after another
        # archiver's or a merged one with this first record; (3) commit the position below which the
        # log may be truncated. After a kill between 1 and 3 the next start finds the file, so the
        # commit may lag behind but is never ahead.
        from rollstream.storage.archive.files import encode_file

        messages = self._pending[partition].next_file()
        first, fence = messages[0], self._archived[partition].fence
        key = archive_key(self._topic, self._run, partition, first.offset, first.timestamp_ms)
        started_s = self._monotonic()
        file = encode_file(self._topic, messages, fence)
        try:
            self._store.create(key, file.data)  # 1
            mine = FileEnd(messages[-1].offset, file.fence)
        except ObjectExists:
            mine = None
        there = self._present_end(key, first.offset, mine)  # 2
        if there != mine:
            log.warning("%s: another archiver wrote it, up to offset %d", key, there.last)
        seconds = self._monotonic() - started_s
        size = len(file.data)
        self._on_file(WrittenFile(self._topic, key, len(messages), size, seconds, there == mine))
        self._continue_at(partition, _position_after(there))
        self._bus.commit(ARCHIVE_GROUP, self._topic, {partition: self._archived[partition]})  # 3

    def _present_end(self, key: str, first: int, mine: FileEnd | None) -> FileEnd:
        prefix = key.removesuffix(f"{first:020d}.parquet")  # of the partition's files of that day
        # The file with offset `first` is this archiver's (`mine`), another's, or a merged one. A
        # suspended archiver can create a name again whose file was merged and deleted meanwhile;
        # the merged file is then in this listing, since it was created before that deletion.
        for _ in range(LISTINGS_MAX):
            listed = (
                parse_archive_key(entry.key, entry.bytes) for entry in self._store.list(prefix)
            )
            holder = [file for file in current_files(listed) if file.first <= first][-1:]
            if holder and holder[0].key == key and mine is not None:
                return mine
            try:
                end = file_end(self._store, holder[0]) if holder else None
            except ObjectMissing:  # merged since the listing
                continue
            if end is not None and end.last >= first:
                return end
        raise ObjectMissing(f"{key} existed and is gone; does a program delete archive files?")

    def _continue_at(self, partition: int, archived: Position) -> None:
        self._archived[partition] = archived
        self._next[partition] = max(self._next[partition], archived.offset)
        if partition in self._pending:
            self._pending[partition].drop_below(archived.offset)
            if not self._pending[partition].messages:
                del self._pending[partition]


def _check_no_gap(where: str, archived: int, begin: int) -> None:
    if archived < begin:
        raise PositionLost(
            f"{where}: records {archived} to {begin - 1} were truncated before they were archived; "
            "the archive would have a gap. Restore the log from a copy, or continue without an "
            "archive (archive.enabled = false)"
        )


def _position_after(end: FileEnd) -> Position:
    return Position(end.last + 1, end.fence)
